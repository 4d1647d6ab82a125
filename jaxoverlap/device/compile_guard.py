"""Notices when the runner's own call compiles after warm-up.

jax.monitoring reports every compile in the thread that caused it, so a guard sees only compiles between its own enter
and exit in its own thread; what else the process compiles is nobody's business here.
"""

from __future__ import annotations

import threading

from jax import monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_open_guards = 0
_current = threading.local()


class CompileError(RuntimeError):
    """A program compiled although all were warm: a launch had a shape that no bucket covers."""


class CompileGuard:
    """Use as `guard.program = name` then `with guard: call`. Counts compiles; once `armed`, one raises CompileError
    naming the program, after the call. Close it when done: the last one to close removes the listener."""

    def __init__(self) -> None:
        self.armed = False
        self.compiles = 0
        self.program = ""
        self._closed = False
        global _open_guards
        with _lock:
            if _open_guards == 0:
                monitoring.register_event_duration_secs_listener(_on_event)
            _open_guards += 1

    def __enter__(self) -> None:
        _current.guard = self
        _current.compiles = 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        compiles = _current.compiles
        _current.guard = None
        self.compiles += compiles
        if compiles and self.armed and kind is None:
            raise CompileError(f"program {self.program} compiled after warm-up")

    def close(self) -> None:
        global _open_guards
        with _lock:
            if self._closed:
                return
            self._closed = True
            _open_guards -= 1
            if _open_guards == 0:
                monitoring.unregister_event_duration_listener(_on_event)


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILE_EVENT and getattr(_current, "guard", None) is not None:
        _current.compiles += 1
