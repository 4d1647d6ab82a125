"""From the recorder's flat log to a Trace.

The log is a list of entries, each a tag and as many values as LENGTH says. Times are `time.perf_counter`, launches are
given by their number, modes are ForwardMode. Tags that are strings are the kinds of the host's spans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jaxoverlap.trace.events import Span, Trace

TURN = 0  # begin
END = 1  # end of the turn, end of handing its outputs to the callers
CAUSE = 2  # why this turn leaves the device idle
COMPILED = 3  # number: the launch's call compiled
READY = 4  # number, time: the launch was first seen ready
SPANS = 5  # number, [(kind, begin, end)]: the device's own times
FORWARD = 6  # number, time: the launch's forward was first seen ready, before its sampling was asked for
GAINED = 7  # number, tokens that the rows of a verify step gained
LENGTH: dict[Any, int] = {
    TURN: 1, END: 2, CAUSE: 1, COMPILED: 1, READY: 2, SPANS: 2, FORWARD: 2, GAINED: 2,
    **dict.fromkeys(("receive", "compose", "mask", "process", "stream"), 1),  # time: since the entry before it was this
    **dict.fromkeys(("launch", "sample"), 5),  # begin, end, number, mode, rows: the driver answered
    "wait": 3,  # begin, end, number
    "sync": 2,  # begin, end
}  # fmt: skip
About = tuple[int, str, int]  # a launch's number, mode, rows
NOTHING: About = (0, "", 0)


def read(log: list[Any], delivered: list[float]) -> Trace:
    """`delivered`: begin, end, begin, end, ... of what gave callers their results."""
    entries = list(_entries(log))
    causes: dict[int, str] = {}
    compiled = {values[0] for tag, *values in entries if tag == COMPILED}
    raw = list(_host(entries, causes))
    begins = [values[0] for tag, *values in entries if tag == TURN]
    for begin, end in zip(delivered[::2], delivered[1::2], strict=True):
        raw.append(("stream", begin, end, bisect_right(begins, end), *NOTHING))
    host = []
    for kind, begin, end, turn, launch, mode, rows in sorted(raw, key=lambda span: span[2]):
        cause = "compile" if kind == "launch" and launch in compiled else causes.get(turn, "")
        host.append(Span(kind, begin, end, turn, launch, mode, rows, cause))
    gained = {values[0]: values[1] for tag, *values in entries if tag == GAINED}
    device = [replace(s, tokens=gained[s.launch]) if s.launch in gained else s for s in _device(entries, host)]
    return Trace(host, device)


def _entries(log: list[Any]) -> Iterator[tuple[Any, ...]]:
    """But for one that is being written."""
    at, end = 0, len(log)
    while at < end:
        after = at + 1 + LENGTH[log[at]]
        if after > end:
            return
        yield tuple(log[at:after])
        at = after


def _host(entries: list[tuple[Any, ...]], causes: dict[int, str]) -> Iterator[tuple[Any, ...]]:
    """The spans of the thread that turns, but for their cause, in order; fills `causes` by turn."""
    turn, begin, kind, launched, about = 0, 0.0, "", False, NOTHING
    launches: dict[int, About] = {}
    for tag, *values in entries:
        if tag == TURN:
            turn, begin, kind, launched, about = turn + 1, values[0], "compose", False, NOTHING
        elif tag == END:
            ended, delivered = values
            yield kind, begin, ended, turn, *about
            if delivered > ended:
                yield "stream", ended, delivered, turn, *NOTHING
        elif tag == CAUSE:
            causes[turn] = values[0]
        elif tag in ("launch", "sample", "wait", "sync"):
            asked, done, *which = values
            yield kind, begin, asked, turn, *about
            if len(which) == 3:
                number, mode, rows = which
                about = number, mode.value, rows
                launches.setdefault(number, about)
            else:
                about = launches.get(which[0], (which[0], "", 0)) if which else NOTHING
            yield tag, asked, done, turn, *about
            begin, launched = done, launched or tag == "launch"
            kind = kind if tag == "sync" else "process"
        elif isinstance(tag, str):
            now = values[0]
            yield tag, begin, now, turn, *about
            begin = now
            if tag == "stream" and not launched:  # the result came before the launch
                kind = "compose"


def _device(entries: list[tuple[Any, ...]], host: list[Span]) -> list[Span]:
    """As the device tells; else from the launches and when each was seen ready. A forward that was not seen ready
    before its delayed sampling was launched is taken to last until that is ready: nothing stood still between."""
    launches = {s.launch: s for s in host if s.kind == "launch"}
    told = [values for tag, *values in entries if tag == SPANS]
    if told:
        steps = [(launches[number], spans) for number, spans in told if number in launches]
        return [Span(kind, a, b, s.turn, s.launch, s.mode, s.rows) for s, spans in steps for kind, a, b in spans]
    ready = {values[0]: values[1] for tag, *values in entries if tag == READY}
    forwards = {values[0]: values[1] for tag, *values in entries if tag == FORWARD}
    delayed = {s.launch for s in host if s.kind == "sample"}
    out: list[Span] = []
    free = 0.0
    for s in host:
        if s.kind not in ("launch", "sample"):
            continue
        forward = s.kind == "launch" and s.launch in delayed
        end = ready.get(s.launch)
        if forward:
            end = forwards.get(s.launch, end)
        if end is not None:
            kind = "sample" if s.kind == "sample" else "forward" if forward else "step"
            out.append(Span(kind, min(max(s.begin, free), end), end, s.turn, s.launch, s.mode, s.rows))
            free = max(free, end)
    return out
