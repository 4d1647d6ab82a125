"""Products of rows, sorted by group, with each group's own matrix."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxoverlap.kernels.backend import Implementation, check_implementation, check_shape, dot, triton_params

_LEAST = 16  # rows, columns or depth of a block that Triton multiplies, at least
_ROWS = 64  # at most
_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul(x: jax.Array, weights: jax.Array, counts: jax.Array, *, implementation: Implementation) -> jax.Array:
    """x [R, K]: its first counts[0] rows times weights[0], the next counts[1] times weights[1], and so on.

    weights [E, N, K] of x's dtype, counts int32 [E] that sum to R. Returns [R, N] in x's dtype; float32 is computed as
    float32 on every platform. A row's result depends on no other row and on no count but the shapes. Raises ValueError
    for other shapes.
    """
    check_implementation(implementation)
    check_shape("x", x, (None, None))
    check_shape("weights", weights, (None, None, x.shape[1]), x.dtype)
    check_shape("counts", counts, weights.shape[:1], jnp.int32)
    if implementation == "xla":
        return lax.ragged_dot_general(
            x,
            weights,
            counts,
            _BY_GROUP,
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            preferred_element_type=x.dtype,
        )
    if weights.size >= 2**31:
        raise ValueError(f"weights of shape {list(weights.shape)} have 2**31 elements or more: set kernels to 'xla'")
    (rows, depth), (groups, width) = x.shape, weights.shape[:2]
    wide = x.dtype.itemsize == 4  # float32 products take more registers
    block_rows = _LEAST if wide else _block(pl.cdiv(rows, groups), _ROWS)
    columns, deep = _block(width, 32 if wide else 128), _block(depth, 32 if wide else 64)
    tiles = _tiles(counts, rows, block_rows)
    return pl.pallas_call(
        functools.partial(_kernel, rows=block_rows, columns=columns, deep=deep),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(tiles.shape[1], pl.cdiv(width, columns)),
        compiler_params=triton_params(num_warps=4, num_stages=3),
        interpret=implementation == "interpret",
        name="grouped_matmul",
    )(x, weights, tiles)


def _block(size: int, most: int) -> int:
    return max(_LEAST, min(most, pl.next_power_of_2(size)))


def _tiles(counts: jax.Array, rows: int, block: int) -> jax.Array:
    """int32 [3, tiles]: group, first row and row behind the last of each block of rows, none of which crosses into
    another group; as many as there are at most, whatever the counts, those left over empty."""
    groups = counts.shape[0]
    blocks = (counts + block - 1) // block
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    index = jnp.arange(min(rows, rows // block + groups), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32), groups - 1)
    last = jnp.cumsum(counts, dtype=jnp.int32)[group]
    first = last - counts[group] + (index - ends[group] + blocks[group]) * block
    return jnp.stack([group, first, jnp.minimum(first + block, last)])


def _kernel(
    x_ref: Any,  # [R, K]
    weights_ref: Any,  # [E, N, K]
    tiles_ref: Any,  # [3, tiles]: group, first row, row behind the last
    out_ref: Any,  # [R, N]
    *,
    rows: int,
    columns: int,
    deep: int,
) -> None:
    tile = pl.program_id(0)  # the fastest: neighbours read the same weights
    group, first, end = (tiles_ref[i, tile] for i in range(3))
    depth, width = x_ref.shape[1], out_ref.shape[1]
    row = first + jnp.arange(rows, dtype=jnp.int32)
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    mine, there = row < end, column < width

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        k = i * deep + jnp.arange(deep, dtype=jnp.int32)
        inside = k < depth
        x = triton.load(x_ref.at[row[:, None], k[None]], mask=mine[:, None] & inside[None], other=0)
        at = group, column[:, None], k[None]
        w = triton.load(weights_ref.at[at], mask=there[:, None] & inside[None], other=0)
        return total + dot(x, w.T)

    turns = pl.cdiv(jnp.clip(end - first, 0, 1) * depth, deep)  # none for a block left over
    total = lax.fori_loop(0, turns, body, jnp.zeros((rows, columns), jnp.float32))
    mask = mine[:, None] & there[None]
    triton.store(out_ref.at[row[:, None], column[None]], total.astype(out_ref.dtype), mask=mask)
