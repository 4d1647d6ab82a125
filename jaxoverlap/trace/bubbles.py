"""Bubbles: the time in which the device had nothing to do between its first step and its last, and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxoverlap.trace.events import Span, Trace

HOST_LATE = "host late"
DELAYED_SAMPLING = "delayed sampling"
EXCHANGE = "exchange"
CALLER = "caller"
CAUSES = {
    HOST_LATE: "host work of a turn that launches",
    "grammar": "waiting for a grammar, or for the tokens that its masks need",
    DELAYED_SAMPLING: "a forward is done and its sampling not launched",
    "no work": "no request could run",
    "consecutive prefill": "a prefill's result handled before the next prefill is launched",
    "compile": "a program compiled inside a launch",
    EXCHANGE: "waiting for the other ranks' facts",
    CALLER: "no turn was made: the caller had the control",
}


def gaps(trace: Trace) -> list[tuple[float, float, str]]:
    """(begin, end, fixed cause or "") of each stretch in which the device stood still, in order."""
    out = []
    steps = sorted(trace.device, key=lambda s: (s.begin, s.end))
    busy_until = steps[0].end if steps else 0.0
    for before, after in itertools.pairwise(steps):
        if after.begin > busy_until:
            inside = after.kind == "sample" and before.kind == "forward" and before.launch == after.launch
            out.append((busy_until, after.begin, DELAYED_SAMPLING if inside else ""))
        busy_until = max(busy_until, after.end)
    return out


def idle_time(traces: Sequence[Trace]) -> float:
    """Seconds."""
    return sum(end - begin for trace in traces for begin, end, _ in gaps(trace))


def bubbles(traces: Sequence[Trace]) -> dict[str, float]:
    """Seconds of each of CAUSES that occurred; they sum to `idle_time`."""
    out: dict[str, float] = {}
    for trace in traces:
        host = _disjoint(trace.host)
        first = 0
        for begin, end, fixed in gaps(trace):
            while first < len(host) and host[first][1] <= begin:
                first += 1
            left = end - begin
            for at in range(first, len(host)):
                span_begin, span_end, cause = host[at]
                if span_begin >= end:
                    break
                part = min(end, span_end) - max(begin, span_begin)
                left -= part
                out[fixed or cause] = out.get(fixed or cause, 0.0) + part
            if left > 0:
                out[fixed or CALLER] = out.get(fixed or CALLER, 0.0) + left
    return {cause: out[cause] for cause in CAUSES if cause in out}


def _disjoint(spans: list[Span]) -> list[tuple[float, float, str]]:
    """(begin, end, cause) in order; where spans of two threads overlap, the earlier one has the time."""
    out: list[tuple[float, float, str]] = []
    until = float("-inf")
    for span in sorted(spans, key=lambda s: s.begin):
        begin = max(span.begin, until)
        if span.end > begin:
            out.append((begin, span.end, span.cause or (EXCHANGE if span.kind == "sync" else HOST_LATE)))
            until = span.end
    return out
