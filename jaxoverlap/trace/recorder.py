"""Records turns while tracing is on. An engine that does not trace runs none of this."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxoverlap.core import Drafts, ForwardMode, Launch, Launches, Runner, Sample, Samples, Sync, Turn, Wait
from jaxoverlap.driver import Driver
from jaxoverlap.trace.events import Trace
from jaxoverlap.trace.read import ASK, CAUSE, COMPILED, END, FORWARD, GAINED, MARK, READY, SPANS, STREAM, TURN, read

KINDS: dict[type, str] = {
    Launch: "launch",
    Launches: "launch",
    Sample: "sample",
    Samples: "sample",
    Wait: "wait",
    Drafts: "wait",
}
ANNOTATIONS: dict[type, tuple[str, ...]] = {
    Launch: ("run_batch",),
    Launches: ("run_batch",),
    Sample: ("launch_batch_sample_if_needed",),
    Samples: ("launch_batch_sample_if_needed",),
    Wait: ("process_batch_result", "wait"),
    Drafts: ("wait",),
}


class Recorder(Driver):
    """A driver that notes what each turn did, and the scheduler's Watch; `trace` gives what it has noted.

    A runner that knows when its steps ran says so in `device_spans(handle)`. Another one's steps end when they are
    first seen ready: at the end of the wait for them, or where the host was busy, at the end of the part of the turn in
    which they became ready. So do forwards whose sampling is delayed, of a runner with `is_forward_ready(handle)`. No
    thread is started for it: one that wakes at every step costs more than a turn.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._log: list[Any] = []  # flat, since a turn must not wait for objects to be made; see read.py
        self._tells_spans = hasattr(runner, "device_spans")
        self._tells_compiles = hasattr(runner, "compiles")
        self._tells_forwards = hasattr(runner, "is_forward_ready")
        self._in_flight: deque[tuple[int, Any]] = deque()  # launches not seen ready yet, of a runner without spans
        self._forward: tuple[int, Any] | None = None  # the one that waits for its sampling, while it is not seen ready
        self._told = 0  # number of the last launch whose spans the device has told

    def trace(self) -> Trace:
        return read(self._log)

    def turn(self, turn: Turn) -> None:
        clock, note = time.perf_counter, self._log.extend
        ask: Any
        answer: Any = None
        note((TURN, clock()))
        try:
            while True:
                try:
                    ask = turn.send(answer)
                except StopIteration:
                    note((END, clock()))
                    return
                asked = clock()
                if self._in_flight:
                    self._poll(asked)
                compiles = self.runner.compiles if self._tells_compiles else 0  # type: ignore[attr-defined]
                answer = self.answer(ask)
                done = clock()
                kind = type(ask)
                if kind is Sync:
                    note((ASK, "sync", asked, done, 0, None, 0))
                    continue
                if kind is Launches or kind is Samples:  # the ranks' steps are one
                    launches, handle = _launches(ask), answer and answer[0]
                    launch, rows = launches[0], sum(len(x.requests) for x in launches)
                    delays = any(x.delay_sample for x in launches)
                else:
                    launch, handle = ask if kind is Launch else ask.launch, answer
                    rows, delays = len(launch.requests), launch.delay_sample
                mode = launch.mode if launch.global_num_tokens is None else _mode(launch)
                note((ASK, KINDS[kind], asked, done, launch.number, mode, rows))
                if self._tells_compiles and self.runner.compiles != compiles:  # type: ignore[attr-defined]
                    note((COMPILED, launch.number))
                if kind is Wait and answer.accept_lens is not None:
                    note((GAINED, launch.number, int(answer.accept_lens.sum())))
                if self._tells_spans:
                    if kind is Wait and launch.number != self._told:
                        note((SPANS, launch.number, self.runner.device_spans(ask.handle)))  # type: ignore[attr-defined]
                        self._told = launch.number
                elif kind is Launch or kind is Launches:
                    self._in_flight.append((launch.number, handle))
                    if self._tells_forwards and delays:
                        self._forward = launch.number, handle
                    self._poll(done)
                elif kind is Sample or kind is Samples:
                    self._forward = None
                elif kind is Wait:
                    self._waited(launch.number, done)
        finally:
            turn.close()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._log.extend((MARK, part, now))
        if self._in_flight:
            self._poll(now)

    def cause(self, cause: str) -> None:
        self._log.extend((CAUSE, cause))

    def stream(self, begin: float, end: float) -> None:
        self._log.extend((STREAM, begin, end))

    def _poll(self, now: float) -> None:
        in_flight, is_ready = self._in_flight, self.runner.is_ready
        while in_flight and is_ready(in_flight[0][1]):
            self._log.extend((READY, in_flight.popleft()[0], now))
        if self._forward is not None and self.runner.is_forward_ready(self._forward[1]):  # type: ignore[attr-defined]
            self._log.extend((FORWARD, self._forward[0], now))
            self._forward = None

    def _waited(self, number: int, now: float) -> None:
        while self._in_flight and self._in_flight[0][0] <= number:
            self._log.extend((READY, self._in_flight.popleft()[0], now))


class Annotator(Recorder):
    """Also names what the host does in a jax.profiler trace, with SGLang's names. `annotate(name)` is
    jax.profiler.TraceAnnotation."""

    def __init__(self, runner: Runner, annotate: Callable[[str], AbstractContextManager[Any]]) -> None:
        super().__init__(runner)
        self._annotate = annotate
        self._open: list[AbstractContextManager[Any]] = []

    def turn(self, turn: Turn) -> None:
        self._enter("process_input_requests")
        try:
            super().turn(turn)
        finally:
            self._leave(everything=True)

    def mark(self, part: str) -> None:
        super().mark(part)
        if part == "receive":
            self._leave(everything=True)
            self._enter("get_next_batch_to_run")
        elif part == "process":
            self._enter("stream_output")
        elif part == "stream":
            self._leave(everything=True)

    def answer(self, ask: Any) -> Any:
        if type(ask) is Sync:
            return super().answer(ask)
        self._leave(everything=True)
        for name in ANNOTATIONS[type(ask)]:
            self._enter(name)
        answer = super().answer(ask)
        self._leave()
        return answer

    def _enter(self, name: str) -> None:
        annotation = self._annotate(name)
        annotation.__enter__()
        self._open.append(annotation)

    def _leave(self, everything: bool = False) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)
            if not everything:
                return


def _launches(ask: Launches | Samples) -> list[Launch]:
    return ask.launches if isinstance(ask, Launches) else [sample.launch for sample in ask.samples]


def _mode(launch: Launch) -> ForwardMode:
    """Of a step that all ranks share."""
    return ForwardMode.EXTEND if launch.is_extend_in_batch else ForwardMode.DECODE
