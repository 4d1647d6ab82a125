"""Figures of a trace. All times in milliseconds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxoverlap.trace.bubbles import bubbles, idle_time
from jaxoverlap.trace.events import WORK, Span, Trace


def summarize(traces: Sequence[Trace]) -> dict[str, Any]:
    """What traces of the same loop say, taken together, about where the time went.

    `step_ms`: from one decode result to the next, where the launches follow each other. `host_ms`: host work of a turn
    that launched a decode step (everything but waiting). `wait_ms`: blocked on the device, or on the
    other ranks, in such a turn. `hidden`:
    share of all host work that ran while a launched step was not ready yet, counted from the return of the launch call
    (so a step never hides its own launch). `device_busy`: share of the time between first launch and last result.
    `parts_ms`: mean per decode turn, by kind. `idle_ms`: device idle between its first step and its last, in all traces
    together; `bubbles_ms` splits it by cause (trace/bubbles.py). Percentiles are None where nothing was measured.
    """
    turns = [turn for trace in traces for turn in _decode_turns(trace)]
    spans = [s for trace in traces for s in trace.device]
    length = sum(trace.device[-1].end - trace.device[0].begin for trace in traces if trace.device)
    work = sum(s.length for trace in traces for s in trace.host if s.kind in WORK)
    return {
        "launches": sum(s.kind != "sample" for s in spans),
        "decode_steps": sum(s.mode == "DECODE" and s.kind != "sample" for s in spans),
        "step_ms": percentiles([t for trace in traces for t in step_times(trace)]),
        "host_ms": percentiles([sum(s.length for s in turn if s.kind in WORK) for turn in turns]),
        "wait_ms": percentiles([sum(s.length for s in turn if s.kind in ("wait", "sync")) for turn in turns]),
        "hidden": sum(_hidden(trace) for trace in traces) / work if work else None,
        "device_busy": sum(s.length for s in spans) / length if length else None,
        "parts_ms": _parts(turns),
        "idle_ms": 1e3 * idle_time(traces),
        "bubbles_ms": {cause: 1e3 * seconds for cause, seconds in bubbles(traces).items()},
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """{"p50", "p90", "mean"} in ms of times in seconds."""
    if not len(seconds):
        return {"p50": None, "p90": None, "mean": None}
    ms = 1e3 * np.asarray(seconds)
    return {"p50": float(np.median(ms)), "p90": float(np.percentile(ms, 90)), "mean": float(ms.mean())}


def step_times(trace: Trace) -> list[float]:
    """Seconds between the results of launches n and n + 1 that both decoded."""
    got = {s.launch: s for s in trace.host if s.kind == "wait" and s.mode == "DECODE"}
    return [s.end - got[n - 1].end for n, s in got.items() if n - 1 in got]


def pauses(trace: Trace) -> list[float]:
    """Seconds from the end of each device step to the begin of the next."""
    return [max(0.0, after.begin - before.end) for before, after in itertools.pairwise(trace.device)]


def in_flight(trace: Trace) -> list[tuple[float, float]]:
    """Disjoint intervals, in order, in which a step had been launched and was not ready."""
    ready = {s.launch: s.end for s in trace.device}
    intervals: list[tuple[float, float]] = []
    for s in trace.host:
        if s.kind != "launch" or ready.get(s.launch, s.end) <= s.end:
            continue
        if intervals and s.end <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], ready[s.launch]))
        else:
            intervals.append((s.end, ready[s.launch]))
    return intervals


def _hidden(trace: Trace) -> float:
    """Seconds of host work that ran while a step was in flight."""
    host = [s for s in trace.host if s.kind in WORK]
    flights = in_flight(trace)
    return float((_covered([s.end for s in host], flights) - _covered([s.begin for s in host], flights)).sum())


def _covered(times: Sequence[float], intervals: list[tuple[float, float]]) -> np.ndarray:
    """float64 [len(times)], seconds before each time that lie inside the (disjoint, ordered) intervals."""
    begins, ends = np.asarray(intervals, np.float64).reshape(-1, 2).T
    before = np.concatenate([[0.0], np.cumsum(ends - begins)])
    at = np.asarray(times, np.float64)
    i = np.searchsorted(begins, at, side="right")
    inside = np.maximum(0.0, np.append(ends, 0.0)[i - 1] - at) if len(begins) else np.zeros_like(at)
    return before[i] - np.where(i > 0, inside, 0.0)


def _decode_turns(trace: Trace) -> list[list[Span]]:
    turns: dict[int, list[Span]] = defaultdict(list)
    for span in trace.host:
        turns[span.turn].append(span)
    return [spans for spans in turns.values() if any(s.kind == "launch" and s.mode == "DECODE" for s in spans)]


def _parts(turns: list[list[Span]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for spans in turns:
        for span in spans:
            total[span.kind] += span.length
    return {kind: 1e3 * seconds / len(turns) for kind, seconds in total.items()}
