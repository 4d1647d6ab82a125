"""From the recorder's flat log to a Trace.

The log is a list of entries, each a tag and as many values as LENGTH says: times (`time.perf_counter`), a launch's
number, its ForwardMode, its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jaxoverlap.trace.events import Span, Trace

TURN = 0  # begin
END = 1  # end of the turn
MARK = 2  # part, time: what went on since the entry before was this part
ASK = 3  # kind, begin, end, number, mode, rows: the driver answered
STREAM = 4  # begin, end; may come from another thread, in the middle of a turn
CAUSE = 5  # why this turn leaves the device idle
COMPILED = 6  # number: the launch's call compiled
READY = 7  # number, time: the launch was first seen ready
SPANS = 8  # number, [(kind, begin, end)]: the device's own times
FORWARD = 9  # number, time: the launch's forward was first seen ready, before its sampling was asked for
GAINED = 10  # number, tokens that the rows of a verify step gained
LENGTH = {TURN: 1, END: 1, MARK: 2, ASK: 6, STREAM: 2, CAUSE: 1, COMPILED: 1, READY: 2, SPANS: 2, FORWARD: 2, GAINED: 2}
NOTHING = (0, "", 0)


def read(log: list[Any]) -> Trace:
    entries = list(_entries(log))
    causes: dict[int, str] = {}
    compiled = {values[0] for tag, *values in entries if tag == COMPILED}
    raw = list(_host(entries, causes))
    host = []
    for kind, begin, end, turn, launch, mode, rows in raw:
        cause = "compile" if kind == "launch" and launch in compiled else causes.get(turn, "")
        host.append(Span(kind, begin, end, turn, launch, mode, rows, cause))
    gained = {values[0]: values[1] for tag, *values in entries if tag == GAINED}
    device = [replace(s, tokens=gained[s.launch]) if s.launch in gained else s for s in _device(entries, host)]
    return Trace(host, device)


def _entries(log: list[Any]) -> Iterator[tuple[Any, ...]]:
    at, end = 0, len(log)
    while at < end:
        length = LENGTH[log[at]] + 1
        yield tuple(log[at : at + length])
        at += length


def _host(entries: list[tuple[Any, ...]], causes: dict[int, str]) -> Iterator[tuple[Any, ...]]:
    """The host's spans but for their cause, in the order in which they ended; fills `causes` by turn."""
    turn, begin, kind, launched, about = 0, 0.0, "", False, NOTHING
    for tag, *values in entries:
        if tag == TURN:
            turn, begin, kind, launched, about = turn + 1, values[0], "compose", False, NOTHING
        elif tag == END:
            yield kind, begin, values[0], turn, *about
        elif tag == MARK:
            part, now = values
            yield part, begin, now, turn, *about
            begin = now
            if part == "stream" and not launched:  # the result came before the launch
                kind = "compose"
        elif tag == ASK:
            asked, asked_at, done, number, mode, rows = values
            yield kind, begin, asked_at, turn, *about
            about = (number, mode.value, rows) if mode is not None else NOTHING
            yield asked, asked_at, done, turn, *about
            begin, launched = done, launched or asked == "launch"
            kind = kind if asked == "sync" else "process"
        elif tag == STREAM:
            yield "stream", *values, turn, *NOTHING
        elif tag == CAUSE:
            causes[turn] = values[0]


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
