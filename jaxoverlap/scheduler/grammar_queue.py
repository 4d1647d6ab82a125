"""Requests whose grammar is being compiled, and the masks of those whose grammar runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxoverlap.core import FinishReason, Grammar, Launch, Request

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


class Compilation(Protocol):
    """concurrent.futures.Future has this shape."""

    def done(self) -> bool: ...

    def result(self) -> Grammar: ...

    def cancel(self) -> bool: ...


class GrammarBackend(Protocol):
    """`key` is SamplingParams.grammar_key: (kind, text)."""

    def compiled(self, key: tuple[str, str]) -> Grammar | None:
        """A fresh state of a grammar that is compiled already."""

    def compile(self, key: tuple[str, str]) -> Compilation: ...


class GrammarQueue:
    def __init__(self, backend: GrammarBackend | None) -> None:
        self.backend = backend
        self.pending: dict[Request, Compilation] = {}
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

    def fail(self, request: Request, reason: FinishReason) -> None:
        """The request runs a prefill of one token and ends there with `reason` (SGLang's set_finish_with_abort)."""
        self.pending[request].cancel()
        request.to_finish = reason
        request.prompt_ids = np.zeros(1, np.int32)
        self._failed.add(request)

    def take_ready(self) -> list[Request]:
        """Those whose grammar is ready, or whose wait has failed, in the order in which they came."""
        ready = [r for r, c in self.pending.items() if r in self._failed or c.done()]
        for r in ready:
            if r not in self._failed:
                try:
                    r.grammar = self.pending[r].result()
                except ValueError as e:
                    self.fail(r, FinishReason("abort", message=str(e), status_code=400, err_type="BadRequestError"))
            del self.pending[r]
            self._failed.discard(r)
        return ready


def fill_masks(s: Scheduler, launch: Launch) -> np.ndarray:
    """int32 [B, ahead, ceil(vocab / 32)], allowed ids as bits; rows without a live grammar allow everything."""
    verifies = s.is_speculative and launch.mode.is_decode
    ahead = s.config.speculative_num_draft_tokens if verifies else 1
    words = np.full((len(launch.requests), ahead, -(-s.vocab_size // 32)), -1, np.int32)
    for i, r in enumerate(launch.requests):
        if r.grammar is not None and not r.finished and not r.grammar.is_terminated():
            r.grammar.fill_mask(words[i], ahead)
    return words
