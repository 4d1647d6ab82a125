"""Ctrl-C between turns: one that is cut short would leave books that nobody can trust."""

from __future__ import annotations

import _signal as signal  # the module behind `signal`, whose enums cost a streamed token 25 of 119 us
import threading
from types import FrameType, TracebackType


class HeldInterrupts:
    """While entered, the first Ctrl-C only sets `pending`; a second one interrupts at once, for a turn that hangs.
    Raises KeyboardInterrupt on leaving with one pending. Does nothing in other threads than the main one, or where the
    program handles SIGINT itself."""

    def __init__(self) -> None:
        self.pending = False
        self._holds = False

    def __enter__(self) -> HeldInterrupts:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._holds = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._holds and signal.getsignal(signal.SIGINT) == self._note:  # nobody has set another one meanwhile
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.pending and error is None:
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
