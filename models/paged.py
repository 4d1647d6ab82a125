"""What a model is to the device side, and PagedContext: all that it sees of the batch it computes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.kernels.kv_write import kv_write
from jaxoverlap.kernels.paged_attention import decode_attention, extend_attention


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "positions",
        "token_rows",
        "token_locs",
        "page_table",
        "seq_lens",
        "q_starts",
        "extend_lens",
        "last_tokens",
    ],
    meta_fields=["page_size", "num_locs", "is_decode", "kernels"],
)
@dataclass(frozen=True)
class PagedContext:
    """A batch of B rows with T tokens, laid out row after row, padding behind. Built inside jit, one for each step.

    The cache is flat: position p of a row lies at `page_table[row, p // page_size] * page_size + p % page_size`, layer
    l at that plus l * num_locs. Page 0 is never given out; padding tokens write there and padding rows have length 0.
    """

    positions: jax.Array  # int32 [T]
    token_rows: jax.Array  # int32 [T], the row of each token; any row for padding
    token_locs: jax.Array  # int32 [T], where the token's KV goes, without the layer's offset
    page_table: jax.Array  # int32 [B, pages]
    seq_lens: jax.Array  # int32 [B], tokens in cache after this step
    q_starts: jax.Array  # int32 [B], the row's first token among the T
    extend_lens: jax.Array  # int32 [B], tokens of the row among the T
    last_tokens: jax.Array  # int32, of each row that is sampled its last token among the T
    page_size: int
    num_locs: int
    is_decode: bool  # T == B, row b is token b
    kernels: Kernels

    def write(
        self, cache: tuple[jax.Array, jax.Array], layer: int, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The cache (K and V, each [layers * num_locs, H, D]) with this step's k and v [T, H, D] in it."""
        locs = self.token_locs + layer * self.num_locs
        return kv_write(*cache, k, v, locs, implementation=self.kernels.kv_write)

    def attend(self, q: jax.Array, cache: tuple[jax.Array, jax.Array], layer: int, scale: float) -> jax.Array:
        """Causal attention of q [T, Hq, D] over the layer's cache, this step's `write` included -> [T, Hq, D]."""
        where = {"page_size": self.page_size, "first_loc": layer * self.num_locs, "scale": scale}
        if self.is_decode:
            chosen = self.kernels.decode_attention
            return decode_attention(q, *cache, self.page_table, self.seq_lens, **where, implementation=chosen)
        lens = (self.seq_lens, self.q_starts, self.extend_lens)
        chosen = self.kernels.extend_attention
        return extend_attention(q, *cache, self.page_table, *lens, **where, implementation=chosen)

    def by_token(self) -> PagedContext:
        """The same tokens as a decode batch with a row for each: what a token attends to is then computed the same way
        whether it came alone or with its whole prompt."""
        tokens = jnp.arange(self.token_rows.shape[0], dtype=jnp.int32)
        real = self.token_locs > 0
        return dataclasses.replace(
            self,
            token_rows=tokens,
            page_table=self.page_table[self.token_rows],
            seq_lens=jnp.where(real, self.positions + 1, 0),
            q_starts=tokens,
            extend_lens=jnp.ones_like(tokens),
            is_decode=True,
        )

    def locations(self, positions: jax.Array) -> jax.Array:
        """Location of `positions` int32 [B, n] of each row -> int32 [B, n]; positions past the table read its end."""
        size = jnp.int32(self.page_size)
        pages = jnp.take_along_axis(self.page_table, lax.div(positions, size), axis=1, mode="clip")
        return pages * size + lax.rem(positions, size)


class Model(Protocol):
    """A Flax nnx module that the runner can serve."""

    config: Any  # at least vocab_size, max_position_embeddings: int; eos_token_ids: tuple[int, ...]

    def cache_shapes(self, num_locs: int) -> Sequence[jax.ShapeDtypeStruct]:
        """The flat cache arrays for `num_locs` locations; the first dimension grows with it."""

    def __call__(
        self, ids: jax.Array, context: PagedContext, cache: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """ids int32 [T] -> hidden [T, D], and the cache with this step in it."""

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [B, D] of the rows' last tokens -> float32 [B, vocab_size]."""
