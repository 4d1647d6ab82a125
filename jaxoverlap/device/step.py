"""The jitted programs, as pure functions: resolve (FutureMap) -> forward -> sample -> stash and publish.

Every program takes (weights, state, packed): the model's flat leaves, the donated state, one int32 array. `fused` is
a whole step. `forward` and `sample` are the same cut in two, for launches whose mask is known late or at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxoverlap.device.buckets import Bucket
from jaxoverlap.device.layout import Layout
from jaxoverlap.device.packing import PAGES_LAYOUT, next_packed
from jaxoverlap.device.state import PROMPT_LEN, State, counted, row_adjustments, row_params
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.kernels.future_map import POISON, gather, scatter, take
from jaxoverlap.kernels.sample import sample
from jaxoverlap.models.paged import PagedContext

if TYPE_CHECKING:
    from jaxoverlap.device.verify import Speculator

Logits = tuple[jax.Array, jax.Array | None]  # f32 [B, V], and the faults int32 [B] with poison


# What the poison check of a row finds.
FAULT_NONE, FAULT_UNWRITTEN, FAULT_LENGTH = 0, 1, 2


@dataclass(frozen=True)
class Outputs:
    """Of one step, rows padded to the bucket; arrays of their own, never donated."""

    fetched: jax.Array  # int32, see packing.unpack_outputs: the one array that goes back to the host
    again: jax.Array | None = None  # of a decode step: the packed array of the next, if rows stay and no page is taken


jax.tree_util.register_dataclass(Outputs, ["fetched", "again"], [])


@dataclass(frozen=True)
class ExtendStep:
    """A prefill of T tokens in B rows, as a speculator sees it."""

    model: Any
    slots: jax.Array  # int32 [B]
    ids: jax.Array  # int32 [T]
    next_ids: jax.Array | None  # int32 [T], where layers are captured: the token behind each; 0 where not sampled yet
    context: PagedContext
    captured: list[jax.Array]  # of the speculator's layers, each [T, hidden]


@dataclass(frozen=True)
class Steps:
    """Makes the programs of one model and one page geometry."""

    graph: Any  # nnx graph definition
    tree: Any  # how the flat weights fold into the model's state
    page_size: int
    num_locs: int
    kernels: Kernels
    poison: bool
    deterministic: bool = False
    speculator: Speculator | None = None

    def fused(self, bucket: Bucket, layout: Layout) -> Callable[..., tuple[State, Outputs]]:
        def step(weights: tuple[jax.Array, ...], state: State, packed: jax.Array) -> tuple[State, Outputs]:
            fields = layout.fields(packed)
            state, logits, faults, _ = self._forward(bucket, weights, state, fields)
            state, fetched = self._sample(state, logits, faults, fields, None)
            stays = bucket.is_decode and self.page_size > 1  # else every step takes pages
            return state, Outputs(fetched, next_packed(layout, fields, jnp) if stays else None)

        return step

    def forward(self, bucket: Bucket, layout: Layout) -> Callable[..., tuple[State, Logits, jax.Array | None]]:
        """Gives logits f32 [B, V] and the faults, for `sample`; of an extend step the hidden states [T, D] too."""

        def step(
            weights: tuple[jax.Array, ...], state: State, packed: jax.Array
        ) -> tuple[State, Logits, jax.Array | None]:
            state, logits, faults, hidden = self._forward(bucket, weights, state, layout.fields(packed))
            return state, (logits, faults), None if bucket.is_decode else hidden

        return step

    def sample(self, layout: Layout) -> Callable[..., tuple[State, Outputs]]:
        def step(state: State, logits: Logits, packed: jax.Array) -> tuple[State, Outputs]:
            fields = layout.fields(packed)
            state, fetched = self._sample(state, *logits, fields, fields["mask"])
            return state, Outputs(fetched)

        return step

    def model(self, weights: tuple[jax.Array, ...]) -> Any:
        """Of the weights, those in front; a draft model's are behind them."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, weights[: self.tree.num_leaves]))

    def run(
        self, model: Any, ids: jax.Array, context: PagedContext, cache: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...], list[jax.Array]]:
        """The model's hidden states and cache, and what enters the layers that the speculator asks for."""
        if self.speculator is None or not self.speculator.layers:
            return *model(ids, context, cache), []
        return model.capturing(ids, context, cache, self.speculator.layers)

    def _forward(
        self, bucket: Bucket, weights: tuple[jax.Array, ...], state: State, fields: dict[str, jax.Array]
    ) -> tuple[State, jax.Array, jax.Array | None, jax.Array]:
        state = write_page_table(state, fields["page_writes"])
        model = self.model(weights)
        if not bucket.is_decode:
            state = _write_params(state, fields)
        state, ids, context, faults = self._resolve(bucket, state, fields)
        hidden, cache, captured = self.run(model, ids, context, state.cache)
        if self.speculator is not None:
            next_ids = _next_ids(ids, context, fields["next_ids"]) if "next_ids" in fields else None
            extended = ExtendStep(model, fields["slots"], ids, next_ids, context, captured)
            state = self.speculator.extend(extended, weights[self.tree.num_leaves :], state)
        logits = model.logits(hidden[context.last_tokens])
        lens = scatter(
            state.new_seq_lens, fields["slots"], fields["seq_lens"], implementation=self.kernels.future_map_scatter
        )
        return dataclasses.replace(state, cache=tuple(cache), new_seq_lens=lens), logits, faults, hidden

    def _resolve(
        self, bucket: Bucket, state: State, fields: dict[str, jax.Array]
    ) -> tuple[State, jax.Array, PagedContext, jax.Array | None]:
        """Input ids int32 [T], with those of decode rows read from the FutureMap, and where they stand."""
        slots, rows = fields["slots"], jnp.arange(bucket.rows, dtype=jnp.int32)
        if bucket.is_decode:
            state, ids, faults = self._relayed(state, slots, fields["seq_lens"])
            context = self.context(state, fields, rows, rows, jnp.ones_like(rows), is_decode=True)
            return state, ids, context, faults
        decoding = rows >= fields["prefills"][0]
        state, relayed, faults = self._relayed(state, jnp.where(decoding, slots, 0), fields["seq_lens"])
        ends = jnp.cumsum(fields["extend_lens"])
        behind = (jnp.arange(bucket.tokens, dtype=jnp.int32)[:, None] >= ends[None]).sum(-1, dtype=jnp.int32)
        token_rows = jnp.minimum(behind, bucket.rows - 1)
        ids = jnp.where(decoding[token_rows], relayed[token_rows], fields["ids"])
        starts = ends - fields["extend_lens"]
        context = self.context(state, fields, token_rows, starts, fields["extend_lens"], is_decode=False)
        return state, ids, context.by_token() if self.deterministic else context, faults

    def _relayed(
        self, state: State, slots: jax.Array, seq_lens: jax.Array
    ) -> tuple[State, jax.Array, jax.Array | None]:
        """Tokens int32 [B] of `slots`; 0 names no slot. With poison: each is read once, right after it was written."""
        if not self.poison:
            return state, gather(state.output_tokens, slots, implementation=self.kernels.future_map_gather), None
        both = {"scatter_with": self.kernels.future_map_scatter, "gather_with": self.kernels.future_map_gather}
        tokens, output_tokens = take(state.output_tokens, slots, **both)
        lens = gather(state.new_seq_lens, slots, implementation=self.kernels.future_map_gather)
        faults = jnp.where(lens + 1 == seq_lens, FAULT_NONE, FAULT_LENGTH)
        faults = jnp.where(slots == 0, FAULT_NONE, jnp.where(tokens == POISON, FAULT_UNWRITTEN, faults))
        return dataclasses.replace(state, output_tokens=output_tokens), jnp.maximum(tokens, 0), faults

    def context(
        self,
        state: State,
        fields: dict[str, jax.Array],
        token_rows: jax.Array,
        q_starts: jax.Array,
        extend_lens: jax.Array,
        *,
        is_decode: bool,
    ) -> PagedContext:
        seq_lens = fields["seq_lens"]
        table = state.page_table[fields["slots"]]
        tokens = jnp.arange(token_rows.shape[0], dtype=jnp.int32)
        offsets = tokens - q_starts[token_rows]
        real = (offsets < extend_lens[token_rows]) & (seq_lens[token_rows] > 0)
        positions = jnp.where(real, (seq_lens - extend_lens)[token_rows] + offsets, 0)
        size = jnp.int32(self.page_size)
        pages = jnp.where(real, table[token_rows, lax.div(positions, size)], 0)
        return PagedContext(
            positions=positions,
            token_rows=token_rows,
            token_locs=jnp.where(real, pages * size + lax.rem(positions, size), 0),
            page_table=table,
            seq_lens=seq_lens,
            q_starts=q_starts,
            extend_lens=extend_lens,
            last_tokens=jnp.maximum(q_starts + extend_lens - 1, 0),
            page_size=self.page_size,
            num_locs=self.num_locs,
            is_decode=is_decode,
            kernels=self.kernels,
        )

    def _sample(
        self,
        state: State,
        logits: jax.Array,
        faults: jax.Array | None,
        fields: dict[str, jax.Array],
        mask: jax.Array | None,
    ) -> tuple[State, jax.Array]:
        slots, positions = fields["slots"], fields["seq_lens"]
        tokens, logprobs = self.pick(state, logits, slots, positions, mask)
        stashed = scatter(state.output_tokens, slots, tokens, implementation=self.kernels.future_map_scatter)
        fetched = [tokens, bits(logprobs), *([] if faults is None else [faults])]
        tables = state.tables.count(slots, tokens, counted(state.params[slots], positions))
        return dataclasses.replace(state, output_tokens=stashed, tables=tables), jnp.stack(fetched)

    def pick(
        self, state: State, logits: jax.Array, slots: jax.Array, positions: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The token at `positions` int32 [B] of each row, and its log-probability."""
        columns = state.params[slots]
        forced = None if state.script is None else _scripted(state.script[slots], positions - columns[:, PROMPT_LEN])
        adjustments = row_adjustments(state.tables, slots, columns, positions)
        chosen = self.kernels.sample
        return sample(logits, row_params(columns), positions, mask, forced, adjustments, implementation=chosen)


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def write_pages(page_table: jax.Array, packed: jax.Array) -> jax.Array:
    """The page table (donated) with the entries of a PAGES_LAYOUT array."""
    slots, index, pages = PAGES_LAYOUT.fields(packed)["page_writes"]
    return page_table.at[slots, index].set(pages)


def _next_ids(ids: jax.Array, context: PagedContext, behind: jax.Array) -> jax.Array:
    """int32 [T]: the token behind each of `ids`; `behind` int32 [B] are those behind the rows."""
    ends = (context.q_starts + context.extend_lens)[context.token_rows]
    at = jnp.arange(len(ids), dtype=jnp.int32)
    return jnp.where(at + 1 == ends, behind[context.token_rows], jnp.roll(ids, -1))


def write_page_table(state: State, page_writes: jax.Array) -> State:
    slots, index, pages = page_writes
    return dataclasses.replace(state, page_table=state.page_table.at[slots, index].set(pages))


def _write_params(state: State, fields: dict[str, jax.Array]) -> State:
    """Parameters of the prefill rows; the others write the padding row."""
    rows = jnp.arange(fields["slots"].shape[0])
    slots = jnp.where(rows < fields["prefills"][0], fields["slots"], 0)
    script = None if state.script is None else state.script.at[slots].set(fields["script"])
    return dataclasses.replace(state, params=state.params.at[slots].set(fields["params"]), script=script)


def _scripted(rows: jax.Array, index: jax.Array) -> jax.Array:
    """int32 [B]: the forced token of each row [B, N] at its output index, else -1."""
    forced = jnp.take_along_axis(rows, index[:, None], axis=1, mode="fill", fill_value=-1)[:, 0]
    return jnp.where(index < 0, -1, forced)
