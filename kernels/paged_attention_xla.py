"""The XLA twins of kernels/paged_attention.py; that module's wrappers say what the arguments are.

Both loop over blocks of KV with a running softmax (Milakov and Gimelshein, arXiv:1805.02867) in float32, so that
neither memory nor time grows with the longest context that is possible, only with the longest that is there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

KV_BLOCK = 64  # tokens of KV looked at in one turn of a loop (at least one page)
Q_BLOCK = 16  # prompt tokens of one row handled together
LOWEST = -1e30  # the peak before any score: finite, so that a masked score, -inf, weighs 0 whatever the others are


class _Running(NamedTuple):
    """Softmax over the KV seen so far: scores below `peak` are exp(score - peak)."""

    out: jax.Array  # f32 [..., D], sum of weighted values
    peak: jax.Array  # f32 [...]
    total: jax.Array  # f32 [...], sum of weights

    @classmethod
    def start(cls, shape: tuple[int, ...]) -> _Running:
        return cls(jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], LOWEST), jnp.zeros(shape[:-1], jnp.float32))

    def result(self) -> jax.Array:
        return self.out / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def decode(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    first_loc: jax.Array,
    *,
    page_size: int,
    scale: float,
    kv_block: int,
) -> jax.Array:
    rows, heads, dim = q.shape
    groups = keys.shape[1]
    grouped = q.reshape(rows, groups, heads // groups, dim)  # [B, Hkv, G, D]
    block, width = _block(page_size, kv_block)

    def body(i: jax.Array, running: _Running) -> _Running:
        locs, positions = _locations(page_table, i, block, page_size)  # [B, width], [width]
        seen = positions[None] < seq_lens[:, None]  # [B, width]
        return _attend(running, grouped, keys, values, locs + first_loc, seen[:, None, None], seen, scale, "b")

    steps = (jnp.max(seq_lens, initial=0) + width - 1) // width
    running = lax.fori_loop(0, steps, body, _Running.start(grouped.shape))
    return running.result().reshape(q.shape).astype(q.dtype)


def extend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    q_starts: jax.Array,
    extend_lens: jax.Array,
    first_loc: jax.Array,
    *,
    page_size: int,
    scale: float,
    kv_block: int,
) -> jax.Array:
    tokens, heads, dim = q.shape
    groups = keys.shape[1]
    q_block = min(Q_BLOCK, tokens)
    grouped = jnp.pad(q.reshape(tokens, groups, heads // groups, dim), ((0, q_block), (0, 0), (0, 0), (0, 0)))
    block, width = _block(page_size, kv_block)
    blocks = (extend_lens + q_block - 1) // q_block  # query blocks of each row
    ends = jnp.cumsum(blocks)

    def query_block(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(ends <= i)
        offset = (i - ends[row] + blocks[row]) * q_block  # into the row's own tokens
        first = q_starts[row] + offset
        here = lax.dynamic_slice_in_dim(grouped, first, q_block)
        query_positions = seq_lens[row] - extend_lens[row] + offset + jnp.arange(q_block)
        table = lax.dynamic_slice_in_dim(page_table, row, 1)

        def body(j: jax.Array, running: _Running) -> _Running:
            locs, positions = _locations(table, j, block, page_size)
            seen = positions[None] <= query_positions[:, None]  # [q_block, width]
            there = positions < seq_lens[row]
            mask = (seen & there)[:, None, None]
            return _attend(running, here, keys, values, locs[0] + first_loc, mask, there, scale, "")

        until = jnp.minimum(seq_lens[row], seq_lens[row] - extend_lens[row] + offset + q_block)
        running = lax.fori_loop(0, (until + width - 1) // width, body, _Running.start(here.shape))
        mine = offset + jnp.arange(q_block) < extend_lens[row]
        old = lax.dynamic_slice_in_dim(out, first, q_block)
        new = jnp.where(mine[:, None, None, None], running.result().astype(out.dtype), old)
        return lax.dynamic_update_slice_in_dim(out, new, first, 0)

    out = lax.fori_loop(0, ends[-1], query_block, jnp.zeros_like(grouped))
    return out[:tokens].reshape(q.shape)


def _attend(
    running: _Running,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    locs: jax.Array,
    mask: jax.Array,
    there: jax.Array,
    scale: float,
    batch: str,
) -> _Running:
    """One block of KV. q [X, Hkv, G, D]; locs and there [width], or [X, width] with `batch` "b"; mask broadcasts to
    [X, Hkv, G, width]. Memory past a row's end may hold anything, NaN included: it is zeroed, not only masked."""
    k = _heads(keys, locs)
    v = jnp.where(there[..., None, :, None], _heads(values, locs).astype(jnp.float32), 0.0)
    precision = lax.Precision.HIGHEST
    scores = jnp.einsum(
        f"bhgd,{batch}hkd->bhgk", q, k, precision=precision, preferred_element_type=jnp.float32
    )  # [X, Hkv, G, width]
    scores = jnp.where(mask, scores * scale, -jnp.inf)
    peak = jnp.maximum(running.peak, scores.max(-1))
    weights = jnp.exp(scores - peak[..., None])
    shrink = jnp.exp(running.peak - peak)
    out = jnp.einsum(f"bhgk,{batch}hkd->bhgd", weights, v, precision=precision, preferred_element_type=jnp.float32)
    return _Running(running.out * shrink[..., None] + out, peak, running.total * shrink + weights.sum(-1))


def _heads(cache: jax.Array, locs: jax.Array) -> jax.Array:
    """[..., Hkv, width, D] of `locs` [..., width]. Heads first, as the products want them: a gather gives any order at
    one cost, and a copy into that order behind it is a quarter of a small decode attention on a CPU."""
    heads = jnp.arange(cache.shape[1], dtype=jnp.int32)[:, None]
    return cache.at[locs[..., None, :], heads].get(mode="clip", wrap_negative_indices=False)


def _block(page_size: int, kv_block: int) -> tuple[int, int]:
    """Pages and tokens of one block of KV."""
    pages = max(1, kv_block // page_size)
    return pages, pages * page_size


def _locations(page_table: jax.Array, i: jax.Array, block: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Locations [B, width] and positions [width] of the i-th block; past the table's end, those of its last page."""
    index = i * block + jnp.arange(block)
    pages = page_table.at[:, index].get(mode="clip")  # [B, block]
    locs = (pages[:, :, None] * page_size + jnp.arange(page_size)).reshape(page_table.shape[0], -1)
    return locs, i * block * page_size + jnp.arange(block * page_size)
