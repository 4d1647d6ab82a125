"""Records turns while tracing is on. An engine that does not trace runs none of this."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxoverlap.core import (
    Drafts,
    ForwardMode,
    Launch,
    Launches,
    Runner,
    Sample,
    Samples,
    StepResult,
    Sync,
    Turn,
    Wait,
)
from jaxoverlap.driver import Driver
from jaxoverlap.trace.events import Trace
from jaxoverlap.trace.read import ASK, CAUSE, COMPILED, END, FORWARD, GAINED, MARK, READY, SPANS, STREAM, TURN, read

RESOLUTION = 50e-6  # seconds
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
    which they became ready; parts that end less than RESOLUTION after a look are not looked at. So do forwards whose
    sampling is delayed, of a runner with `is_forward_ready(handle)`. No thread is started for it: one that wakes at
    every step costs more than a turn.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._log: list[Any] = []  # flat, since a turn must not wait for objects to be made; see read.py
        self._note = self._log.extend
        self._tells_spans = hasattr(runner, "device_spans")
        self._tells_compiles = hasattr(runner, "compiles")
        self._tells_forwards = hasattr(runner, "is_forward_ready")
        self._follows = self._tells_compiles or not self._tells_spans
        self._compiles: int = runner.compiles if self._tells_compiles else 0  # type: ignore[attr-defined]
        self._in_flight: deque[tuple[int, Any]] = deque()  # launches not seen ready yet, of a runner without spans
        self._forward: tuple[int, Any] | None = None  # the one that waits for its sampling, while it is not seen ready
        self._looked = 0.0  # when it was last looked whether they are ready
        self._told = 0  # number of the last launch whose spans the device has told
        self._answered: dict[type, Callable[[Any, Any, float, float], None]] = {
            Launch: self._launched,
            Launches: self._all_launched,
            Sample: self._sampled,
            Samples: self._all_sampled,
            Wait: self._waited,
            Drafts: self._drafted,
            Sync: self._synced,
        }

    def trace(self) -> Trace:
        return read(self._log)

    def turn(self, turn: Turn) -> None:
        clock, send, note, answered = time.perf_counter, turn.send, self._note, self._answered
        answer: Any = None
        note((TURN, clock()))
        try:
            while True:
                try:
                    ask = send(answer)
                except StopIteration:
                    note((END, clock()))
                    return
                asked = clock()
                if self._in_flight and type(ask) is not Wait:  # which says itself when its step was ready
                    self._look(asked)
                answer = self.answer(ask)
                answered[type(ask)](ask, answer, asked, clock())
        finally:
            turn.close()

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._note((MARK, part, now))
        if self._in_flight and now - self._looked > RESOLUTION:
            self._look(now)

    def cause(self, cause: str) -> None:
        self._note((CAUSE, cause))

    def stream(self, begin: float, end: float) -> None:
        self._note((STREAM, begin, end))

    def _launched(self, launch: Launch, handle: Any, asked: float, done: float) -> None:
        mode = launch.mode if launch.global_num_tokens is None else _mode(launch)
        self._note((ASK, "launch", asked, done, launch.number, mode, len(launch.requests)))
        if self._follows:
            self._follow(launch.number, handle, launch.delay_sample, done)

    def _all_launched(self, ask: Launches, handles: list[Any], asked: float, done: float) -> None:
        """The ranks' steps are one."""
        self._note_all("launch", ask.launches, asked, done)
        delays = any(launch.delay_sample for launch in ask.launches)
        self._follow(ask.launches[0].number, handles[0], delays, done)

    def _follow(self, number: int, handle: Any, delays: bool, done: float) -> None:
        self._check_compiles(number)
        if self._tells_spans:
            return
        self._in_flight.append((number, handle))
        if delays and self._tells_forwards:
            self._forward = number, handle
        self._look(done)  # a device without a queue has computed it inside the call

    def _sampled(self, ask: Sample, _: Any, asked: float, done: float) -> None:
        launch = ask.launch
        self._note((ASK, "sample", asked, done, launch.number, _mode(launch), len(launch.requests)))
        self._check_compiles(launch.number)
        self._forward = None

    def _all_sampled(self, ask: Samples, _: Any, asked: float, done: float) -> None:
        launches = [sample.launch for sample in ask.samples]
        self._note_all("sample", launches, asked, done)
        self._check_compiles(launches[0].number)
        self._forward = None

    def _check_compiles(self, number: int) -> None:
        if self._tells_compiles and self.runner.compiles != self._compiles:  # type: ignore[attr-defined]
            self._compiles = self.runner.compiles  # type: ignore[attr-defined]
            self._note((COMPILED, number))

    def _waited(self, ask: Wait, result: StepResult, asked: float, done: float) -> None:
        launch = ask.launch
        number = launch.number
        mode = launch.mode if launch.global_num_tokens is None else _mode(launch)
        self._note((ASK, "wait", asked, done, number, mode, len(launch.requests)))
        if result.accept_lens is not None:
            self._note((GAINED, number, int(result.accept_lens.sum())))
        if self._tells_spans:
            if number != self._told:
                self._note((SPANS, number, self.runner.device_spans(ask.handle)))  # type: ignore[attr-defined]
                self._told = number
            return
        self._looked = done  # what follows in flight has just begun
        while self._in_flight and self._in_flight[0][0] <= number:
            self._note((READY, self._in_flight.popleft()[0], done))

    def _drafted(self, ask: Drafts, _: Any, asked: float, done: float) -> None:
        launch = ask.launch
        self._note((ASK, "wait", asked, done, launch.number, _mode(launch), len(launch.requests)))

    def _synced(self, ask: Sync, facts: Any, asked: float, done: float) -> None:
        self._note((ASK, "sync", asked, done, 0, None, 0))

    def _note_all(self, kind: str, launches: list[Launch], asked: float, done: float) -> None:
        rows = sum(len(launch.requests) for launch in launches)
        self._note((ASK, kind, asked, done, launches[0].number, _mode(launches[0]), rows))

    def _look(self, now: float) -> None:
        self._looked = now
        in_flight, is_ready = self._in_flight, self.runner.is_ready
        while in_flight and is_ready(in_flight[0][1]):
            self._note((READY, in_flight.popleft()[0], now))
        if self._forward is not None and self.runner.is_forward_ready(self._forward[1]):  # type: ignore[attr-defined]
            self._note((FORWARD, self._forward[0], now))
            self._forward = None


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


def _mode(launch: Launch) -> ForwardMode:
    """Of a step that all ranks share, what any of them does."""
    if launch.global_num_tokens is None:
        return launch.mode
    return ForwardMode.EXTEND if launch.is_extend_in_batch else ForwardMode.DECODE
