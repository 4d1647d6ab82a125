"""Traces as files: a PNG to look at, JSON for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxoverlap.trace.bubbles import DELAYED_SAMPLING, gaps
from jaxoverlap.trace.events import Span, Trace

COLOURS = {
    "receive": "#e45756",
    "compose": "#4c78a8",
    "launch": "#f58518",
    "mask": "#ff9da6",
    "sample": "#b279a2",
    "sync": "#9d755d",
    "process": "#54a24b",
    "stream": "#72b7b2",
    "wait": "#e4e4e4",
    "step": "#8a8fb9",
    "other step": "#5d6299",
    "forward": "#8a8fb9",
    "idle": "#fbd5d5",
    DELAYED_SAMPLING: "#e3c3ee",
}


def chrome_trace(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """The Trace Event format: one process a trace, one thread a lane, times in microseconds from the trace's begin."""
    events: list[dict[str, Any]] = []
    for pid, (name, trace) in enumerate(traces.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        for tid, (lane, spans) in enumerate(trace.lanes().items(), 1):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}})
            events += [_event(span, pid, tid, trace.begin) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, pid: int, tid: int, origin: float) -> dict[str, Any]:
    name = f"{span.mode} {span.launch}" if span.kind == "step" else span.kind
    args = {"turn": span.turn, "launch": span.launch, "mode": span.mode, "rows": span.rows, "cause": span.cause}
    if span.tokens:
        args["tokens"] = span.tokens
    ts, dur = 1e6 * (span.begin - origin), 1e6 * span.length
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def write_timeline(path: Path, traces: Mapping[str, Trace], windows: Mapping[str, tuple[float, float]]) -> None:
    """Writes FILE.png (the windows) or FILE.json (everything). Raises ValueError for another suffix."""
    check_timeline_path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(traces)))
    else:
        _write_png(path, traces, windows)


def check_timeline_path(path: Path) -> None:
    """Raises ValueError or ImportError, before anything is measured, when `write_timeline` could not write there."""
    if path.suffix not in (".png", ".json"):
        raise ValueError(f"a timeline is written as FILE.png or FILE.json, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"folder {str(path.parent)!r} does not exist")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ImportError('a PNG timeline needs matplotlib: pip install "jaxoverlap[demo]"') from None


def _write_png(path: Path, traces: Mapping[str, Trace], windows: Mapping[str, tuple[float, float]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.0 + 2.1 * len(traces)), dpi=130, layout="constrained")
    axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    length = max(1e3 * (end - begin) for begin, end in windows.values())
    kinds: set[str] = set()
    for axis, (name, trace) in zip(axes, traces.items(), strict=True):
        begin, end = windows[name]
        shown = trace.between(begin, end)
        lanes = shown.lanes()
        names = list(lanes)
        for y, spans in enumerate(lanes.values()):
            _draw(axis, spans, y, begin, length)
        for a, b, cause in gaps(trace):
            if b > begin and a < end:
                kind, at = cause or "idle", 1e3 * (a - begin)
                axis.broken_barh(
                    [(at, 1e3 * (b - a))], (names.index("device") - 0.35, 0.7), color=COLOURS[kind], linewidth=0
                )
                kinds.add(kind)
        kinds |= {s.kind for s in (*shown.host, *shown.device)}
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_title(name, loc="left", fontsize=11)
        for y in range(1, len(names)):
            axis.axhline(y - 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlim(0, length)
    axes[-1].set_xlabel("milliseconds")
    labels = {"idle": "device idle", DELAYED_SAMPLING: "device idle: delayed sampling"}
    patches = [Patch(color=COLOURS[k], label=labels.get(k, k)) for k in COLOURS if k in kinds]
    figure.legend(handles=patches, loc="outside upper center", ncols=min(len(patches), 8), frameon=False, fontsize=9)
    figure.savefig(path)


def _draw(axis: Any, spans: list[Span], y: int, origin: float, window: float) -> None:
    """Milliseconds from `origin` on; a step wide enough for it carries its launch's number."""
    for span in spans:
        colour = "other step" if span.kind == "step" and span.launch % 2 else span.kind
        left, length = 1e3 * (span.begin - origin), 1e3 * span.length
        edge = 0.0 if span.kind in ("step", "wait") else 0.6  # short work is seen too
        axis.broken_barh([(left, length)], (y - 0.35, 0.7), color=COLOURS[colour], linewidth=edge)
        if span.kind in ("step", "forward") and length > window / 50:
            middle = (max(left, 0) + min(left + length, window)) / 2
            axis.text(middle, y, str(span.launch), ha="center", va="center", color="white", fontsize=9, clip_on=True)
