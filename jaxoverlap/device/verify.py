"""The verify program: a decode step of several tokens a row, drafted and scored on the device.

A row's length and last token come from the FutureMap, since the host hears one launch late how many the step before
accepted. The model scores that token and the drafts behind it in one forward; at each place the token is picked as a
plain step would pick it, from the row's parameters, seed and position. A draft counts if it is that token, so the
tokens are those of plain decoding whatever was drafted, sampled ones included: stronger than rejection sampling, which
keeps the distribution alone. Drafts that are sampled use the same noise, which makes them likely to agree.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.device.adjustments import Tables
from jaxoverlap.device.layout import Layout
from jaxoverlap.device.state import State, counted
from jaxoverlap.device.step import ExtendStep, Outputs, Steps, bits, write_page_table
from jaxoverlap.kernels.future_map import gather, scatter
from jaxoverlap.models.paged import PagedContext

Weights = tuple[jax.Array, ...]
Cache = tuple[jax.Array, ...]
Accepting = tuple[Tables, jax.Array, jax.Array]  # tables, whether a row's next place counts, how many have


class Speculator(ABC):
    """How a verify step drafts; traced into the programs. `weights` are the draft's, `draft` a model of its own, if
    there is one."""

    num_draft_tokens: int  # tokens that a row may gain in one step: one fewer are drafted
    draft: Any | None = None
    layers: tuple[int, ...] = ()  # of the target (a Decoder), in order; what enters them is captured

    def hidden_shape(self, rows: int) -> jax.ShapeDtypeStruct | None:
        """Of State.draft_hidden, if there is to be one."""
        return None

    def extend(self, step: ExtendStep, weights: Weights, state: State) -> State:
        """Takes note of a prefill."""
        return state

    @abstractmethod
    def propose(self, step: VerifyStep, weights: Weights, state: State) -> tuple[jax.Array, State]:
        """Drafts int32 [num_draft_tokens - 1, B] of the tokens behind `step.bonus`."""

    def scored(self, step: VerifyStep, weights: Weights, state: State, scores: Scores) -> State:
        """Takes note of what a verify step scored."""
        return state


@dataclass(frozen=True)
class Scores:
    """Of the bonus tokens and the drafts behind them, place after place."""

    drafts: jax.Array  # int32 [D - 1, B]
    captured: list[jax.Array]  # of the speculator's layers, each [D * B, hidden]
    accepted: jax.Array  # int32 [B], how many of a row's D places count


@dataclass(frozen=True)
class VerifyStep:
    """B rows of which `bonus` is the last token, to be written at position `lens`. Padding rows: slot and length 0."""

    steps: Steps
    model: Any
    slots: jax.Array  # int32 [B]
    bonus: jax.Array  # int32 [B]
    lens: jax.Array  # int32 [B], tokens in cache
    mask: jax.Array | None  # int32 [B, num_draft_tokens, words]

    def context(self, state: State, tokens: int, ahead: int) -> PagedContext:
        """Of `tokens` a row from position lens + ahead on, place after place, as a decode batch with a row for each:
        every token then attends to those up to itself."""
        places = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), len(self.slots))
        slots, lens = jnp.tile(self.slots, tokens), jnp.tile(self.lens, tokens) + places + ahead + 1
        rows = jnp.arange(len(slots), dtype=jnp.int32)
        known = {"slots": slots, "seq_lens": jnp.where(slots == 0, 0, lens)}
        return self.steps.context(state, known, rows, rows, jnp.ones_like(rows), is_decode=True)

    def pick(self, state: State, logits: jax.Array, ahead: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """The token `ahead` places behind the bonus token and its log-probability, from f32 [B, V]."""
        mask = None if self.mask is None else self.mask[:, ahead]
        return self.steps.pick(state, logits, self.slots, self.lens + ahead + 1, mask)


def verify(steps: Steps, layout: Layout) -> Callable[..., tuple[State, Outputs]]:
    """The whole step."""

    def step(weights: Weights, state: State, packed: jax.Array) -> tuple[State, Outputs]:
        rows, state = _rows(steps, weights, state, layout.fields(packed))
        drafts, state = _speculator(steps).propose(rows, weights[steps.tree.num_leaves :], state)
        return _score(rows, weights, state, drafts)

    return step


def draft(steps: Steps, layout: Layout) -> Callable[..., tuple[State, jax.Array]]:
    """The first part of a step with grammar rows: gives the drafts int32 [D - 1, B], made under the masks known so far;
    the others follow from them."""

    def step(weights: Weights, state: State, packed: jax.Array) -> tuple[State, jax.Array]:
        rows, state = _rows(steps, weights, state, layout.fields(packed))
        drafts, state = _speculator(steps).propose(rows, weights[steps.tree.num_leaves :], state)
        return state, drafts

    return step


def score(steps: Steps, layout: Layout) -> Callable[..., tuple[State, Outputs]]:
    """The rest of it, under masks of every place."""

    def step(weights: Weights, state: State, drafts: jax.Array, packed: jax.Array) -> tuple[State, Outputs]:
        rows, state = _rows(steps, weights, state, layout.fields(packed))
        return _score(rows, weights, state, drafts)

    return step


def _speculator(steps: Steps) -> Speculator:
    assert steps.speculator is not None
    return steps.speculator


def _rows(steps: Steps, weights: Weights, state: State, fields: dict[str, jax.Array]) -> tuple[VerifyStep, State]:
    state, slots = write_page_table(state, fields["page_writes"]), fields["slots"]
    bonus = gather(state.output_tokens, slots, implementation=steps.kernels.future_map_gather)
    lens = gather(state.new_seq_lens, slots, implementation=steps.kernels.future_map_gather)
    lens = jnp.where(slots == 0, 0, lens)
    return VerifyStep(steps, steps.model(weights), slots, bonus, lens, fields.get("mask")), state


def _score(rows: VerifyStep, weights: Weights, state: State, drafts: jax.Array) -> tuple[State, Outputs]:
    """One forward of the bonus tokens and the drafts, what of it counts, and that into the FutureMap."""
    ids = jnp.concatenate([rows.bonus[None], drafts])
    context = rows.context(state, len(ids), 0)
    hidden, cache, captured = rows.steps.run(rows.model, ids.reshape(-1), context, state.cache)
    logits = rows.model.logits(hidden).reshape(*ids.shape, -1)
    state = dataclasses.replace(state, cache=tuple(cache), history=write_history(state, ids.reshape(-1), context))
    picked, logprobs, accepted, state = accept(rows, state, drafts, logits)
    scores = Scores(drafts, captured, accepted)
    state = _speculator(rows.steps).scored(rows, weights[rows.steps.tree.num_leaves :], state, scores)
    last = jnp.take_along_axis(picked, accepted[None] - 1, axis=0)[0]
    into = rows.steps.kernels.future_map_scatter
    state = dataclasses.replace(
        state,
        output_tokens=scatter(state.output_tokens, rows.slots, last, implementation=into),
        new_seq_lens=scatter(state.new_seq_lens, rows.slots, rows.lens + accepted, implementation=into),
    )
    return state, Outputs(jnp.concatenate([picked, bits(logprobs), jnp.stack([accepted, rows.lens, rows.bonus])]))


def accept(
    rows: VerifyStep, state: State, drafts: jax.Array, logits: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, State]:
    """Tokens int32 [D, B] and their log-probabilities, how many count int32 [B], and the state with those counted.

    logits f32 [D, B, V], drafts int32 [D - 1, B]. A row's run ends before a place whose mask allows nothing: it was not
    known.
    """
    columns = state.params[rows.slots]
    follows = jnp.concatenate([drafts, jnp.full((1, drafts.shape[1]), -1, jnp.int32)])
    known = jnp.ones(follows.shape, bool)  # the place behind
    if rows.mask is not None:
        known = known.at[:-1].set(jnp.any(rows.mask[:, 1:] != 0, axis=-1).T)

    def place(carry: Accepting, at: tuple[jax.Array, ...]) -> tuple[Accepting, tuple[jax.Array, jax.Array]]:
        tables, counts, accepted = carry
        ahead, logits, follows, known = at
        token, logprob = rows.pick(dataclasses.replace(state, tables=tables), logits, ahead)
        tables = tables.count(rows.slots, token, counted(columns, rows.lens + ahead + 1) & counts)
        return (tables, counts & (token == follows) & known, accepted + counts), (token, logprob)

    start = (state.tables, jnp.ones(rows.slots.shape, bool), jnp.zeros_like(rows.slots))
    places = (jnp.arange(len(logits), dtype=jnp.int32), logits, follows, known)
    # A loop would end the CUDA graph; on a CPU sampling is most of what there is to compile.
    unroll = rows.steps.kernels.sample != "xla"
    (tables, _, accepted), (tokens, logprobs) = lax.scan(place, start, places, unroll=unroll)
    return tokens, logprobs, accepted, dataclasses.replace(state, tables=tables)


def write_history(state: State, ids: jax.Array, context: PagedContext) -> jax.Array | None:
    """The history with `ids` int32 [T] at the places of `context`."""
    return None if state.history is None else state.history.at[context.token_locs].set(ids)
