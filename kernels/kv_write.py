"""Write a step's keys and values into the flat paged cache."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxoverlap.kernels.backend import Implementation, check_implementation, check_shape, triton_params

_LANES = 1024  # numbers of one token written by one program


def kv_write(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, locs: jax.Array, *, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    """`keys` and `values` with `k` and `v` at `locs`, in place where they are donated.

    keys, values [N, H, D], k, v [T, H, D] (cast to the cache's dtype), locs int32 [T]. Locations of real tokens are
    distinct; padding tokens name a location of page 0, which belongs to nobody. Locations outside 0..N-1 are dropped.
    Raises ValueError for other shapes.
    """
    check_implementation(implementation)
    check_shape("keys", keys, (None, None, None))
    check_shape("values", values, keys.shape, keys.dtype)
    check_shape("locs", locs, (None,), jnp.int32)
    for name, new in (("k", k), ("v", v)):
        check_shape(name, new, (locs.shape[0], *keys.shape[1:]))
    if implementation == "xla":
        write = _update if locs.shape[0] == 1 and keys.shape[0] else _scatter
        return write(keys, k.astype(keys.dtype), locs), write(values, v.astype(values.dtype), locs)
    size, heads, dim = keys.shape
    width = heads * dim
    lanes = min(_LANES, pl.next_power_of_2(width))
    shape = jax.ShapeDtypeStruct((size, width), keys.dtype)
    written = pl.pallas_call(
        functools.partial(_kernel, size=size, width=width, lanes=lanes),
        out_shape=(shape, shape),
        grid=(locs.shape[0], pl.cdiv(width, lanes)),
        input_output_aliases={3: 0, 4: 1},
        compiler_params=triton_params(num_warps=4, num_stages=1),
        interpret=implementation == "interpret",
        name="kv_write",
    )(locs, k.reshape(-1, width), v.reshape(-1, width), keys.reshape(size, width), values.reshape(size, width))
    return written[0].reshape(keys.shape), written[1].reshape(keys.shape)


def _scatter(cache: jax.Array, new: jax.Array, locs: jax.Array) -> jax.Array:
    return cache.at[locs].set(new, mode="drop", wrap_negative_indices=False)


def _update(cache: jax.Array, new: jax.Array, locs: jax.Array) -> jax.Array:
    """`_scatter` of one token. XLA makes this of it too, but takes several kernels of a CPU to it."""
    start = (locs[0], 0, 0)
    is_there = (locs[0] >= 0) & (locs[0] < cache.shape[0])
    old = lax.dynamic_slice(cache, start, new.shape, allow_negative_indices=False)
    return lax.dynamic_update_slice(cache, jnp.where(is_there, new, old), start, allow_negative_indices=False)


def _kernel(
    locs_ref: Any,  # [T]
    k_ref: Any,  # [T, H * D]
    v_ref: Any,  # [T, H * D]
    _keys: Any,  # [N, H * D], the same memory as keys_ref
    _values: Any,  # [N, H * D], the same memory as values_ref
    keys_ref: Any,  # [N, H * D]
    values_ref: Any,  # [N, H * D]
    *,
    size: int,
    width: int,
    lanes: int,
) -> None:
    token = pl.program_id(0)
    columns = pl.program_id(1) * lanes + jnp.arange(lanes, dtype=jnp.int32)
    there = columns < width
    loc = locs_ref[token]
    mask = there & (loc >= 0) & (loc < size)
    for new_ref, cache_ref in ((k_ref, keys_ref), (v_ref, values_ref)):
        new = triton.load(new_ref.at[token, columns], mask=there, other=0)
        triton.store(cache_ref.at[loc, columns], new.astype(cache_ref.dtype), mask=mask)
