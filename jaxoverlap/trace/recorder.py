"""Records turns while tracing is on. An engine that does not trace runs none of this."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

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
from jaxoverlap.trace.read import CAUSE, COMPILED, END, FORWARD, GAINED, READY, SPANS, TURN, read

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
        self._log: list[Any] = []  # see read.py
        self._note = self._log.append  # value by value: between the parts of a turn that is cheaper than tuples
        self._delivered: list[float] = []  # begin, end, begin, end, ...: other threads deliver too
        self._tells_spans = hasattr(runner, "device_spans")
        self._tells_compiles = hasattr(runner, "compiles")
        self._tells_forwards = hasattr(runner, "is_forward_ready")
        self._follows = self._tells_compiles or not self._tells_spans
        self._compiles: int = runner.compiles if self._tells_compiles else 0  # type: ignore[attr-defined]
        self._in_flight: deque[tuple[int, Any]] = deque()  # launches not seen ready yet, of a runner without spans
        self._forward: tuple[int, Any] | None = None  # the one that waits for its sampling, while it is not seen ready
        self._looked = 0.0  # when it was last looked whether they are ready
        self._told = 0  # number of the last launch whose spans the device has told

    def trace(self) -> Trace:
        return read(list(self._log), list(self._delivered))

    def turn(self, turn: Turn) -> None:
        """A driver's turn; its end is told to `end_turn`."""
        note = self._note
        note(TURN)
        note(time.perf_counter())
        super().turn(turn)

    def end_turn(self, ended: float, delivered: float) -> None:
        """When the turn had ended, and when its outputs were with the callers; the same where there were none."""
        note = self._note
        note(END)
        note(ended)
        note(delivered)

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        note = self._note
        note(part)
        note(now)
        if self._in_flight and now - self._looked > RESOLUTION:
            self._look(now)

    def cause(self, cause: str) -> None:
        self._log += (CAUSE, cause)

    def deliver(self, begin: float, end: float) -> None:
        """A caller was given a result (`time.perf_counter`). From any thread."""
        self._delivered += (begin, end)

    def launch(self, ask: Launch) -> Any:
        asked = time.perf_counter()
        if self._in_flight:
            self._look(asked)
        handle = self.runner.launch([ask])[0]
        done = time.perf_counter()
        self._note_step("launch", asked, done, ask, len(ask.requests))
        if self._follows:
            self._follow(ask.number, handle, ask.delay_sample, done)
        return handle

    def launch_all(self, ask: Launches) -> list[Any]:
        """The ranks' steps are one."""
        first = ask.launches[0]
        asked = self._now_looked()
        handles = super().launch_all(ask)
        done = time.perf_counter()
        self._note_step("launch", asked, done, first, sum(len(launch.requests) for launch in ask.launches))
        if self._follows:
            self._follow(first.number, handles[0], any(launch.delay_sample for launch in ask.launches), done)
        return handles

    def sample(self, ask: Sample) -> None:
        asked = self._now_looked()
        super().sample(ask)
        self._sampled([ask], asked)

    def sample_all(self, ask: Samples) -> None:
        asked = self._now_looked()
        super().sample_all(ask)
        self._sampled(ask.samples, asked)

    def wait(self, ask: Wait) -> StepResult:
        asked = time.perf_counter()
        result = self.runner.wait(ask.handle)
        done = time.perf_counter()
        number = ask.launch.number
        note = self._note
        note("wait")
        note(asked)
        note(done)
        note(number)
        if result.accept_lens is not None:
            self._log += (GAINED, number, int(result.accept_lens.sum()))
        if self._tells_spans:
            if number != self._told:
                note(SPANS)
                note(number)
                note(self.runner.device_spans(ask.handle))  # type: ignore[attr-defined]
                self._told = number
            return result
        self._looked = done  # what follows in flight has just begun
        in_flight = self._in_flight
        while in_flight and in_flight[0][0] <= number:
            self._log += (READY, in_flight.popleft()[0], done)
        return result

    def drafts(self, ask: Drafts) -> np.ndarray:
        asked = self._now_looked()
        drafts = super().drafts(ask)
        self._log += ("wait", asked, time.perf_counter(), ask.launch.number)
        return drafts

    def sync(self, ask: Sync) -> np.ndarray:
        asked = self._now_looked()
        facts = super().sync(ask)
        self._log += ("sync", asked, time.perf_counter())
        return facts

    def _note_step(self, kind: str, asked: float, done: float, launch: Launch, rows: int) -> None:
        note = self._note
        note(kind)
        note(asked)
        note(done)
        note(launch.number)
        note(launch.mode if launch.global_num_tokens is None else _joint_mode(launch))
        note(rows)

    def _sampled(self, samples: list[Sample], asked: float) -> None:
        done = time.perf_counter()
        first = samples[0].launch
        self._note_step("sample", asked, done, first, sum(len(sample.launch.requests) for sample in samples))
        self._check_compiles(first.number)
        self._forward = None

    def _follow(self, number: int, handle: Any, delays: bool, done: float) -> None:
        self._check_compiles(number)
        if self._tells_spans:
            return
        self._in_flight.append((number, handle))
        if delays and self._tells_forwards:
            self._forward = number, handle
        self._look(done)  # a device without a queue has computed it inside the call

    def _check_compiles(self, number: int) -> None:
        if self._tells_compiles and self.runner.compiles != self._compiles:  # type: ignore[attr-defined]
            self._compiles = self.runner.compiles  # type: ignore[attr-defined]
            self._log += (COMPILED, number)

    def _now_looked(self) -> float:
        now = time.perf_counter()
        if self._in_flight:
            self._look(now)
        return now

    def _look(self, now: float) -> None:
        self._looked = now
        in_flight, is_ready = self._in_flight, self.runner.is_ready
        while in_flight and is_ready(in_flight[0][1]):
            self._log += (READY, in_flight.popleft()[0], now)
        if self._forward is not None and self.runner.is_forward_ready(self._forward[1]):  # type: ignore[attr-defined]
            self._log += (FORWARD, self._forward[0], now)
            self._forward = None


class Annotator(Recorder):
    """Also names what the host does in a jax.profiler trace, with SGLang's names. `annotate(name)` is
    jax.profiler.TraceAnnotation."""

    def __init__(self, runner: Runner, annotate: Callable[[str], AbstractContextManager[Any]]) -> None:
        super().__init__(runner)
        self._annotate = annotate
        self._open: list[AbstractContextManager[Any]] = []
        for kind, names in ANNOTATIONS.items():
            self.answers[kind] = self._named(names, self.answers[kind])

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

    def _named(self, names: tuple[str, ...], answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def named(ask: Any) -> Any:
            self._leave(everything=True)
            for name in names:
                self._enter(name)
            answered = answer(ask)
            self._leave()
            return answered

        return named

    def _enter(self, name: str) -> None:
        annotation = self._annotate(name)
        annotation.__enter__()
        self._open.append(annotation)

    def _leave(self, everything: bool = False) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)
            if not everything:
                return


def _joint_mode(launch: Launch) -> ForwardMode:
    """Of a step that all ranks share, what any of them does."""
    return ForwardMode.EXTEND if launch.is_extend_in_batch else ForwardMode.DECODE
