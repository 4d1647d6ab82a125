"""The masks of rows with a grammar: when they are known, and what they allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Grammar, Launch, Request

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def fill_masks(s: Scheduler, launch: Launch) -> np.ndarray:
    """int32 [B, ahead, ceil(vocab / 32)], allowed ids as bits; rows without a live grammar allow everything."""
    return _fill(s, launch, [(i, r.grammar) for i, r in _grammar_rows(launch)])


def known_masks(s: Scheduler, launch: Launch) -> np.ndarray | None:
    """`fill_masks` before the result in flight is known, where none of the rows needs it: those with no token on its
    way, and those whose mask left that token no choice. None: the sampling has to be delayed."""
    in_flight = {(slot, epoch) for x, _ in s.result_queue for slot, epoch in _sampled_rows(x)}
    rows: list[tuple[int, Grammar | None]] = []
    for i, r in _grammar_rows(launch):
        if (int(launch.slots[i]), int(launch.epochs[i])) not in in_flight:
            rows.append((i, r.grammar))
        elif r.forced_token < 0:
            return None
        else:
            assert r.grammar is not None
            rows.append((i, r.grammar.after(r.forced_token)))
    return _fill(s, launch, rows)


def _grammar_rows(launch: Launch) -> list[tuple[int, Request]]:
    return [(i, r) for i, r in enumerate(launch.requests) if r.grammar is not None and not r.finished]


def _sampled_rows(launch: Launch) -> list[tuple[int, int]]:
    """(slot, epoch) of the grammar rows whose token will count: not in the middle of their prompt."""
    rows = [i for i, r in _grammar_rows(launch) if r is not launch.chunked]
    return [(int(launch.slots[i]), int(launch.epochs[i])) for i in rows]


def _fill(s: Scheduler, launch: Launch, rows: Sequence[tuple[int, Grammar | None]]) -> np.ndarray:
    verifies = s.is_speculative and launch.mode.is_decode
    ahead = s.config.speculative_num_draft_tokens if verifies else 1
    words = np.full((len(launch.requests), ahead, -(-s.vocab_size // 32)), -1, np.int32)
    live = [(i, grammar) for i, grammar in rows if grammar is not None and not grammar.is_terminated()]
    if live:
        assert s.grammars.backend is not None
        s.grammars.backend.fill_masks(live, words)
    if s.config.delay_sampling == "when-needed":
        for i, _ in live:
            launch.requests[i].forced_token = _only(words[i, 0])
    return words


def _only(words: np.ndarray) -> int:
    """The one id that a mask allows, else -1."""
    (at,) = np.nonzero(words)
    if len(at) != 1:
        return -1
    bits = int(words[at[0]]) & 0xFFFFFFFF
    return int(at[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else -1
