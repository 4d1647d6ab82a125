"""Drafts of an EAGLE-3 head, in chains (SGLang's EAGLE3 with a top-k of 1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxoverlap.device.state import State
from jaxoverlap.device.step import ExtendStep
from jaxoverlap.device.verify import Scores, Speculator, VerifyStep, Weights
from jaxoverlap.models.eagle3 import Eagle3Head


class Eagle3Speculator(Speculator):
    """Each token is picked as the target's is, with the row's parameters and noise, among the ids that the head has.

    What the head keeps of a place follows from the token behind it too, so that cached prefixes are told apart by pairs
    of tokens (Scheduler's `bigram`), and of the last token in the cache it is written when the next is known.
    """

    def __init__(self, head: Eagle3Head, layers: tuple[int, ...], num_draft_tokens: int) -> None:
        self.draft: Eagle3Head = head
        self.layers = layers
        self.num_draft_tokens = num_draft_tokens
        self._graph, params = nnx.split(head)
        self._tree = jax.tree.structure(params)

    def hidden_shape(self, rows: int) -> jax.ShapeDtypeStruct:
        config = self.draft.config
        return jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.dtype(config.dtype))

    def extend(self, step: ExtendStep, weights: Weights, state: State) -> State:
        head = self._head(weights)
        hidden = head.reduced(step.captured)
        assert step.next_ids is not None
        _, cache = head(step.model, step.next_ids, hidden, step.context, _cache(state))
        return _with(state, cache, step.slots, hidden[step.context.last_tokens])

    def propose(self, step: VerifyStep, weights: Weights, state: State) -> tuple[jax.Array, State]:
        head = self._head(weights)
        assert state.draft_hidden is not None
        hidden, token, cache = state.draft_hidden[step.slots], step.bonus, _cache(state)
        drafts: list[jax.Array] = []
        while len(drafts) < self.num_draft_tokens - 1:
            hidden, cache = head(step.model, token, hidden, step.context(state, 1, len(drafts) - 1), cache)
            token, _ = step.pick(state, head.logits(step.model, hidden), len(drafts))
            drafts.append(token)
        return jnp.stack(drafts), dataclasses.replace(state, draft_cache=cache)

    def scored(self, step: VerifyStep, weights: Weights, state: State, scores: Scores) -> State:
        """The places of drafts that counted again, now from the target's hidden states."""
        head, (places, rows) = self._head(weights), scores.drafts.shape
        hidden = head.reduced(scores.captured)
        context = step.context(state, places, 0)
        _, cache = head(step.model, scores.drafts.reshape(-1), hidden[: places * rows], context, _cache(state))
        last = (scores.accepted - 1) * rows + jnp.arange(rows, dtype=jnp.int32)
        return _with(state, cache, step.slots, hidden[last])

    def _head(self, weights: Weights) -> Any:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))


def _cache(state: State) -> tuple[jax.Array, jax.Array]:
    k, v = state.draft_cache
    return k, v


def _with(state: State, cache: tuple[jax.Array, ...], slots: jax.Array, hidden: jax.Array) -> State:
    assert state.draft_hidden is not None
    return dataclasses.replace(state, draft_cache=cache, draft_hidden=state.draft_hidden.at[slots].set(hidden))
