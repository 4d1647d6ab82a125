"""Stream: the results of a call while they grow. Imports no jax."""

from __future__ import annotations

import time
from typing import Any

from jaxoverlap.calls import Call
from jaxoverlap.core import RequestError
from jaxoverlap.loop import Loop


class Stream:
    """Iterates over the results of a call; see Engine.generate. `close` aborts what has not ended and returns when it
    has; leaving the iterator to the garbage collector does the same."""

    def __init__(self, loop: Loop, call: Call) -> None:
        self._loop = loop
        self._call = call
        self._refused = iter(call.refused)
        self._closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._closed:
            raise StopIteration
        for refused in self._refused:
            return refused
        call, loop = self._call, self._loop
        try:
            loop.drive(lambda: bool(call.news) or not call.pending)
        except BaseException:
            self.close()
            raise
        recorder = loop.recorder
        begin = 0.0 if recorder is None else time.perf_counter()
        with loop.lock:
            if not call.news:
                raise StopIteration
            ticket = call.take()
            now = ticket.snapshot()
        result = ticket.render(now)
        if recorder is not None:
            recorder.deliver(begin, time.perf_counter())
        return raise_refused(result) if ticket.index is None else result

    def close(self) -> None:
        self._closed = True
        self._loop.abandon(self._call)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._loop.collect(self._call)


def raise_refused(result: dict[str, Any]) -> dict[str, Any]:
    """The result, unless the request was refused: then RequestError."""
    reason = result["meta_info"]["finish_reason"]
    if reason is not None and reason.get("status_code") == 400:
        raise RequestError(reason["message"])
    return result
