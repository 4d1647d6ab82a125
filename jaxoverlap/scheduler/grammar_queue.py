"""Requests whose grammar is being compiled (SGLang's grammar queue)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxoverlap.core import FinishReason, Grammar, Request


class Compilation(Protocol):
    """concurrent.futures.Future has this shape."""

    def done(self) -> bool: ...

    def result(self) -> Grammar: ...

    def cancel(self) -> bool: ...


class GrammarBackend(Protocol):
    """`key` is SamplingParams.grammar_key: (kind, text)."""

    def compiled(self, key: tuple[str, str]) -> Grammar | None:
        """A fresh state of a grammar that is compiled already."""

    def compile(self, key: tuple[str, str]) -> Compilation:
        """Its result raises ValueError for a grammar that is none; the request ends with the message."""

    def fill_masks(self, rows: Sequence[tuple[int, Grammar]], words: np.ndarray) -> None:
        """The mask of each (row, grammar) into int32 [B, ahead, ceil(vocab / 32)]; the other rows stay as they are."""


class GrammarQueue:
    """`timeout`: seconds that a request waits for its grammar."""

    def __init__(self, backend: GrammarBackend | None, timeout: float) -> None:
        self.backend = backend
        self.timeout = timeout
        self.pending: dict[Request, Compilation] = {}
        self._deadlines: dict[Request, float] = {}  # time.monotonic()
        self._failed: set[Request] = set()

    def take_compiled(self, request: Request) -> bool:
        key = request.params.grammar_key
        assert key is not None
        assert self.backend is not None, "a request with a grammar, but no grammar backend"
        request.grammar = self.backend.compiled(key)
        return request.grammar is not None

    def compile(self, request: Request) -> None:
        key = request.params.grammar_key
        assert key is not None
        assert self.backend is not None
        self.pending[request] = self.backend.compile(key)
        self._deadlines[request] = time.monotonic() + self.timeout

    def fail(self, request: Request, reason: FinishReason) -> None:
        """The request runs a prefill of one token and ends there with `reason` (SGLang's set_finish_with_abort)."""
        self.pending[request].cancel()
        request.to_finish = reason
        request.prompt_ids = np.zeros(1, np.int32)
        request.details = None  # they name places of the prompt that was
        request.stop_len = 0  # what it samples is no answer to its prompt
        self._failed.add(request)

    def take_ready(self) -> list[Request]:
        """Those whose grammar is ready, or whose wait has failed, in the order in which they came."""
        now = time.monotonic()
        for r, compilation in self.pending.items():
            if now > self._deadlines[r] and not compilation.done() and r not in self._failed:
                self.fail(r, _refused(f"the grammar was not compiled within grammar_timeout, {self.timeout:g} s"))
        ready = [r for r, c in self.pending.items() if r in self._failed or c.done()]
        for r in ready:
            if r not in self._failed:
                try:
                    r.grammar = self.pending[r].result()
                except ValueError as e:
                    self.fail(r, _refused(str(e)))
            del self.pending[r], self._deadlines[r]
            self._failed.discard(r)
        return ready


def _refused(message: str) -> FinishReason:
    return FinishReason("abort", message=message, status_code=400, err_type="BadRequestError")
