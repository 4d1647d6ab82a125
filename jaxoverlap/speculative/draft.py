"""Drafts of a model: one of its own (SGLang's STANDALONE), or the first layers of the target. Chains of one token a
forward; each token is picked as the target's is, with the row's parameters and noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxoverlap.device.state import State
from jaxoverlap.device.step import ExtendStep
from jaxoverlap.device.verify import Speculator, VerifyStep, Weights, write_history


class DraftModelSpeculator(Speculator):
    """`draft` is a models.paged.Model of the target's vocabulary. Its cache lies in the same
    locations as the target's, so that slots, pages and cached prefixes serve both."""

    def __init__(self, draft: Any, num_draft_tokens: int) -> None:
        self.draft = draft
        self.num_draft_tokens = num_draft_tokens
        self._graph, params = nnx.split(draft)
        self._tree = jax.tree.structure(params)

    def extend(self, step: ExtendStep, weights: Weights, state: State) -> State:
        _, cache = self._model(weights)(step.ids, step.context, state.draft_cache)
        history = write_history(state, step.ids, step.context)
        return dataclasses.replace(state, draft_cache=tuple(cache), history=history)

    def propose(self, step: VerifyStep, weights: Weights, state: State) -> tuple[jax.Array, State]:
        draft = self._model(weights)
        assert state.history is not None
        # After a run that counted whole, its last draft is not in the draft's cache: every step writes the token before
        # the last one again.
        context = step.context(state, 2, -1)
        before = state.history[context.token_locs[: len(step.slots)]]
        hidden, cache = draft(jnp.concatenate([before, step.bonus]), context, state.draft_cache)
        hidden = hidden[len(step.slots) :]
        drafts: list[jax.Array] = []
        while True:
            token, _ = step.pick(state, draft.logits(hidden), len(drafts))
            drafts.append(token)
            if len(drafts) == self.num_draft_tokens - 1:
                return jnp.stack(drafts), dataclasses.replace(state, draft_cache=tuple(cache))
            hidden, cache = draft(token, step.context(state, 1, len(drafts)), cache)

    def _model(self, weights: Weights) -> Any:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights))


class FirstLayersSpeculator(Speculator):
    """The target's first `num_layers` layers, its last norm and its head. They need no cache
    of their own: what they write is what the target writes there."""

    def __init__(self, num_layers: int, num_draft_tokens: int) -> None:
        self.num_layers = num_layers
        self.num_draft_tokens = num_draft_tokens

    def propose(self, step: VerifyStep, weights: Weights, state: State) -> tuple[jax.Array, State]:
        token, cache, drafts = step.bonus, state.cache, []
        for ahead in range(self.num_draft_tokens - 1):
            hidden, cache = step.model(token, step.context(state, 1, ahead), cache, num_layers=self.num_layers)
            token, _ = step.pick(state, step.model.logits(hidden), ahead)
            drafts.append(token)
        return jnp.stack(drafts), dataclasses.replace(state, cache=tuple(cache))
