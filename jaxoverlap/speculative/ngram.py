"""N-gram drafts (prompt lookup): what followed the row's last tokens where they stood before, looked up on the device.

SGLang's NGRAM keeps a trie of all requests on the host; here a row looks through its own tokens, so that its drafts do
not depend on its company.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.device.state import State
from jaxoverlap.device.step import ExtendStep
from jaxoverlap.device.verify import Speculator, VerifyStep, Weights, write_history
from jaxoverlap.models.paged import PagedContext

LONGEST = 8  # tokens of a match that count
WIDTH = 256  # positions looked at in one turn of the loop


class NgramSpeculator(Speculator):
    """The continuation of the longest match, of the latest among equals. A match that runs
    into the row's end is continued with itself; without any, the last token is repeated."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def extend(self, step: ExtendStep, weights: Weights, state: State) -> State:
        return dataclasses.replace(state, history=write_history(state, step.ids, step.context))

    def propose(self, step: VerifyStep, weights: Weights, state: State) -> tuple[jax.Array, State]:
        context = step.context(state, 1, 0)
        history = write_history(state, step.bonus, context)
        assert history is not None
        drafts = look_up(history, context, step.lens, self.num_draft_tokens - 1)
        return drafts, dataclasses.replace(state, history=history)


def look_up(history: jax.Array, context: PagedContext, last: jax.Array, drafts: int) -> jax.Array:
    """int32 [drafts, B], what may follow the row's tokens up to position `last` int32 [B]."""
    ends = latest_match(history, context, last)
    ahead = jnp.arange(drafts, dtype=jnp.int32)[:, None]
    at = jnp.where(ends < 0, last, ends + 1 + ahead % jnp.maximum(last - ends, 1))
    return history[context.locations(at.T)].T


def latest_match(history: jax.Array, context: PagedContext, last: jax.Array) -> jax.Array:
    """int32 [B]: of the row's positions before `last` int32 [B], the one whose tokens up to it agree with most of those
    up to `last` (LONGEST at most), the latest among equals; -1 where not even one does."""

    def read(positions: jax.Array) -> jax.Array:
        return history[context.locations(jnp.maximum(positions, 0))]

    suffix = read(last[:, None] - jnp.arange(LONGEST, dtype=jnp.int32))  # [B, LONGEST], the last token first
    places = jnp.arange(WIDTH, dtype=jnp.int32)
    before = LONGEST - 1  # tokens that a block reads in front of its first position

    def block(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first = i * WIDTH
        tokens = read(
            jnp.broadcast_to(first - before + jnp.arange(WIDTH + before, dtype=jnp.int32), (len(last), WIDTH + before))
        )
        agrees = first + places < last[:, None]  # [B, WIDTH]
        lengths = jnp.zeros(agrees.shape, jnp.int32)
        for n in range(LONGEST):
            same = tokens[:, before - n : before - n + WIDTH] == suffix[:, n, None]
            agrees &= same & (first + places >= n)
            lengths += agrees
        at = jnp.argmax(lengths * WIDTH + places, axis=1).astype(jnp.int32)
        length = jnp.take_along_axis(lengths, at[:, None], axis=1)[:, 0]
        better = (length > 0) & (length >= best[0])
        return jnp.where(better, length, best[0]), jnp.where(better, first + at, best[1])

    blocks = (jnp.max(last) + WIDTH - 1) // WIDTH
    return lax.fori_loop(0, blocks, block, (jnp.zeros_like(last), jnp.full_like(last, -1)))[1]
