"""Attention over the paged KV cache: decode (one token a row) and extend (ragged prompts over a cached prefix).

Position p of a row lies at `first_loc + page_table[row, p // page_size] * page_size + p % page_size`. What lies past a
row's end may be anything, NaN included. Softmax and sums are float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxoverlap.kernels import paged_attention_pallas as pallas
from jaxoverlap.kernels import paged_attention_xla as xla
from jaxoverlap.kernels.backend import Implementation, check_implementation, check_shape

_STATIC = ("page_size", "scale", "implementation", "kv_block", "splits")


@functools.partial(jax.jit, static_argnames=_STATIC)  # traced once for all layers
def decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    page_size: int,
    first_loc: int | jax.Array,
    scale: float,
    implementation: Implementation,
    kv_block: int | None = None,
    splits: int | None = None,
) -> jax.Array:
    """One query token a row, over the first `seq_lens` positions of the row.

    q [B, Hq, D], keys and values [N, Hkv, D] with Hq a multiple of Hkv, page_table int32 [B, P], seq_lens int32 [B] ->
    [B, Hq, D] of q's dtype, zeros where a row's length is 0. `kv_block`: tokens of KV looked at together; `splits`:
    parts of a row's KV that the Pallas kernel handles apart and then combines; both are chosen from the shapes when not
    given. Raises ValueError for other shapes.
    """
    check_implementation(implementation)
    check_shape("seq_lens", seq_lens, (q.shape[0],), jnp.int32)
    _check(q, keys, values, page_table, q.shape[0])
    first = jnp.asarray(first_loc, jnp.int32)
    args = (q, keys, values, page_table, seq_lens, first)
    if implementation == "xla":
        return xla.decode(*args, page_size=page_size, scale=scale, kv_block=kv_block or xla.KV_BLOCK)
    interpret = implementation == "interpret"
    where = {"page_size": page_size, "scale": scale, "kv_block": kv_block, "interpret": interpret}
    return pallas.decode(*args, **where, splits=splits)


@functools.partial(jax.jit, static_argnames=_STATIC[:-1])
def extend_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    q_starts: jax.Array,
    extend_lens: jax.Array,
    *,
    page_size: int,
    first_loc: int | jax.Array,
    scale: float,
    implementation: Implementation,
    kv_block: int | None = None,
) -> jax.Array:
    """Causal attention of the last `extend_lens` positions of each row over all before them and themselves.

    q [T, Hq, D]: row b owns tokens q_starts[b] .. q_starts[b] + extend_lens[b] - 1, at positions seq_lens[b] -
    extend_lens[b] and up. Rows lie one behind the other; the tokens behind them come out as zeros. keys and values
    [N, Hkv, D], page_table int32 [B, P], the others int32 [B]. -> [T, Hq, D] of q's dtype. Raises ValueError for other
    shapes.
    """
    check_implementation(implementation)
    rows = page_table.shape[0]
    for name, array in (("seq_lens", seq_lens), ("q_starts", q_starts), ("extend_lens", extend_lens)):
        check_shape(name, array, (rows,), jnp.int32)
    _check(q, keys, values, page_table, rows)
    first = jnp.asarray(first_loc, jnp.int32)
    args = (q, keys, values, page_table, seq_lens, q_starts, extend_lens, first)
    if implementation == "xla":
        return xla.extend(*args, page_size=page_size, scale=scale, kv_block=kv_block or xla.KV_BLOCK)
    interpret = implementation == "interpret"
    return pallas.extend(*args, page_size=page_size, scale=scale, kv_block=kv_block, interpret=interpret)


def _check(q: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, rows: int) -> None:
    check_shape("q", q, (None, None, None))
    check_shape("keys", keys, (None, None, q.shape[2]))
    check_shape("values", values, keys.shape, keys.dtype)
    check_shape("page_table", page_table, (rows, None), jnp.int32)
    if q.shape[1] % keys.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of the cache's {keys.shape[1]}")
