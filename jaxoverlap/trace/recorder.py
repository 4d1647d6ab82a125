"""Records turns while tracing is on. An engine that does not trace runs none of this."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxoverlap.core import Launch, Runner, Sample, Sync, Turn, Wait
from jaxoverlap.driver import Driver
from jaxoverlap.trace.events import Span, Trace

SWITCH_INTERVAL = 1e-4  # seconds; Python's 5 ms would blur when the watcher sees a result
KINDS: dict[type, str] = {Launch: "launch", Sample: "sample", Wait: "wait"}
Raw = tuple[str, float, float, int, int, str, int]  # the fields of Span


class Watcher(threading.Thread):
    """Notes when each step is done: blocks on one handle after the other, in launch order."""

    def __init__(self, block: Callable[[Any], Any]) -> None:
        super().__init__(name="jaxoverlap-trace", daemon=True)
        self._block = block
        self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self.ready: dict[int, float] = {}

    def watch(self, number: int, handle: Any) -> None:
        self._queue.put((number, handle))

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            number, handle = item
            try:
                self._block(handle)
            except Exception:
                continue  # the loop meets the same error when it waits
            self.ready[number] = time.perf_counter()
            del item, handle

    def stop(self) -> None:
        """Returns when everything queued has been seen."""
        self._queue.put(None)
        self.join()


class Recorder(Driver):
    """A driver that notes what each turn did. `start` before the first turn, `stop` returns the Trace.

    `block(handle)` must return when the step behind the handle is done; it is called from the watcher's thread.
    """

    def __init__(self, runner: Runner, block: Callable[[Any], Any] | None = None) -> None:
        super().__init__(runner)
        self._watcher = Watcher(runner.wait if block is None else block)
        self._host: list[Raw] = []
        self._launched: dict[int, Raw] = {}
        self._waited: dict[int, float] = {}
        self._turns = 0
        self._switch_interval = sys.getswitchinterval()

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._watcher.start()

    def stop(self) -> Trace:
        self._watcher.stop()
        sys.setswitchinterval(self._switch_interval)
        return Trace([Span(*raw) for raw in self._host], self._device())

    def turn(self, turn: Turn) -> None:
        self._turns += 1
        kind, about = "compose", (0, "", 0)
        answer: Any = None
        begin = time.perf_counter()
        try:
            while True:
                try:
                    ask = turn.send(answer)
                except StopIteration:
                    ask = None
                asked = time.perf_counter()
                self._host.append((kind, begin, asked, self._turns, *about))
                if ask is None:
                    return
                answer = self.answer(ask)
                begin = time.perf_counter()
                about = self._note(ask, answer, asked, begin)
                kind = "process" if type(ask) is Wait else kind
        finally:
            turn.close()

    def stream(self, begin: float, end: float) -> None:
        self._host.append(("stream", begin, end, self._turns, 0, "", 0))

    def _note(self, ask: Any, answer: Any, begin: float, end: float) -> tuple[int, str, int]:
        if type(ask) is Sync:
            self._host.append(("sync", begin, end, self._turns, 0, "", 0))
            return 0, "", 0
        launch: Launch = ask if type(ask) is Launch else ask.launch
        about = (launch.number, launch.mode.value, len(launch.requests))
        raw = (KINDS[type(ask)], begin, end, self._turns, *about)
        self._host.append(raw)
        if type(ask) is Launch:
            self._launched[launch.number] = raw
            if not launch.delay_sample:
                self._watcher.watch(launch.number, answer)
        elif type(ask) is Sample:
            self._watcher.watch(launch.number, ask.handle)
        else:
            self._waited[launch.number] = end
        return about

    def _device(self) -> list[Span]:
        steps = []
        free = 0.0
        for number, (_, begin, _, turn, _, mode, rows) in self._launched.items():
            seen = [at[number] for at in (self._watcher.ready, self._waited) if number in at]
            if not seen:
                continue
            begin, end = max(begin, free), min(seen)
            steps.append(Span("step", min(begin, end), end, turn, number, mode, rows))
            free = max(free, end)
        return steps
