"""The masks of rows with a grammar: when they are known, and what they allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Grammar, Launch, Request

if TYPE_CHECKING:
    from jaxoverlap.scheduler.scheduler import Scheduler


def fill_masks(s: Scheduler, launch: Launch) -> np.ndarray:
    """int32 [B, ahead, ceil(vocab / 32)], allowed ids as bits; rows without a live grammar allow everything, and so do
    all places but the first of a verify step whose masks follow from its drafts."""
    rows = [(i, r.grammar) for i, r in _grammar_rows(launch)]
    ahead = s.config.speculative_num_draft_tokens if s.is_speculative and launch.mode.is_decode else 1
    if ahead == 1 or not launch.delay_sample:
        return _fill(s, launch, rows, ahead)
    words = _fill(s, launch, rows, 1)
    behind = np.full((len(words), ahead - 1, words.shape[2]), -1, np.int32)
    return np.concatenate([words, behind], axis=1)


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
    return _fill(s, launch, rows, 1)


def draft_masks(s: Scheduler, launch: Launch, drafts: np.ndarray) -> np.ndarray:
    """The masks of all places of a verify step, each in the state that the drafts before it (of int32 [B, drafts]) lead
    to. Behind a draft that its mask forbids, and behind the grammar's end, masks allow nothing: the row's run ends
    there. The requests' own grammars do not move."""
    words = fill_masks(s, launch) if launch.mask is None else launch.mask.copy()
    for i, r in _grammar_rows(launch):
        grammar = r.grammar
        assert grammar is not None
        if grammar.is_terminated():
            continue
        for j, token in enumerate(drafts[i].tolist()):
            words[i, j + 1 :] = 0
            if not words[i, j, token // 32] >> token % 32 & 1:
                break
            grammar = grammar.after(token)
            if grammar.is_terminated():
                break
            grammar.fill_mask(words[i, j + 1 : j + 2], 1)
    return words


def _grammar_rows(launch: Launch) -> list[tuple[int, Request]]:
    return [(i, r) for i, r in enumerate(launch.requests) if r.grammar is not None and not r.finished]


def _sampled_rows(launch: Launch) -> list[tuple[int, int]]:
    """(slot, epoch) of the grammar rows whose token will count: not in the middle of their prompt."""
    rows = [i for i, r in _grammar_rows(launch) if r is not launch.chunked]
    return [(int(launch.slots[i]), int(launch.epochs[i])) for i in rows]


def _fill(s: Scheduler, launch: Launch, rows: Sequence[tuple[int, Grammar | None]], ahead: int) -> np.ndarray:
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
