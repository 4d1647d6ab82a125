"""The FutureMap's scatter and gather: one value per request slot, relayed from a step to the next on the device.

A row belongs to a slot, never to a launch. Row 0 belongs to nobody: padding reads and writes it, so that a padded row
can never undo a real write. Rows outside the map are dropped by `scatter` and read as 0 by `gather`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxoverlap.kernels.backend import Implementation, check_implementation, check_shape, triton_params

POISON = -1
_MIN_LANES = 16


def scatter(buffer: jax.Array, rows: jax.Array, values: jax.Array, *, implementation: Implementation) -> jax.Array:
    """`buffer` with `values` at `rows`, in place where the buffer is donated.

    buffer [R], rows int32 [B], values [B] of the buffer's dtype. Rows other than 0 must be distinct; what row 0 holds
    afterwards is unspecified when several entries name it. Raises ValueError for other shapes or dtypes.
    """
    check_implementation(implementation)
    check_shape("buffer", buffer, (None,))
    check_shape("rows", rows, (None,), jnp.int32)
    check_shape("values", values, rows.shape, buffer.dtype)
    size = buffer.shape[0]
    if implementation == "xla":
        return buffer.at[jnp.where(rows < 0, size, rows)].set(values, mode="drop")
    rows, values = _pad(rows), _pad(values)
    return pl.pallas_call(
        functools.partial(_scatter_kernel, size=size),
        out_shape=jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
        input_output_aliases={2: 0},
        compiler_params=triton_params(num_warps=4, num_stages=1),
        interpret=implementation == "interpret",
        name="future_map_scatter",
    )(rows, values, buffer)


def gather(buffer: jax.Array, rows: jax.Array, *, implementation: Implementation) -> jax.Array:
    """`buffer[rows]`: buffer [R], rows int32 [B] -> [B]. Raises ValueError for other shapes or dtypes."""
    check_implementation(implementation)
    check_shape("buffer", buffer, (None,))
    check_shape("rows", rows, (None,), jnp.int32)
    size = buffer.shape[0]
    if implementation == "xla":
        return buffer.at[jnp.where(rows < 0, size, rows)].get(mode="fill", fill_value=0)
    padded = _pad(rows)
    out = pl.pallas_call(
        functools.partial(_gather_kernel, size=size),
        out_shape=jax.ShapeDtypeStruct(padded.shape, buffer.dtype),
        compiler_params=triton_params(num_warps=4, num_stages=1),
        interpret=implementation == "interpret",
        name="future_map_gather",
    )(padded, buffer)
    return out[: rows.shape[0]]


def take(
    buffer: jax.Array, rows: jax.Array, *, scatter_with: Implementation, gather_with: Implementation
) -> tuple[jax.Array, jax.Array]:
    """Debug form of `gather`: what was read, and the buffer with those rows poisoned (-1), so that a value that is
    read twice, or before it was written, shows. Values are relayed as they are: -1 where poison was read."""
    values = gather(buffer, rows, implementation=gather_with)
    poison = jnp.full(rows.shape, POISON, buffer.dtype)
    return values, scatter(buffer, rows, poison, implementation=scatter_with)


def _pad(x: jax.Array) -> jax.Array:
    """To a power of two, as Triton asks; padding rows are row 0."""
    lanes = max(_MIN_LANES, pl.next_power_of_2(x.shape[0]))
    return jnp.pad(x, (0, lanes - x.shape[0]))


def _scatter_kernel(
    rows_ref: Any,  # [lanes]
    values_ref: Any,  # [lanes]
    _: Any,  # [R], the same memory as buffer_ref
    buffer_ref: Any,  # [R]
    *,
    size: int,
) -> None:
    rows = rows_ref[...]
    triton.store(buffer_ref.at[rows], values_ref[...], mask=(rows >= 0) & (rows < size))


def _gather_kernel(
    rows_ref: Any,  # [lanes]
    buffer_ref: Any,  # [R]
    out_ref: Any,  # [lanes]
    *,
    size: int,
) -> None:
    rows = rows_ref[...]
    out_ref[...] = triton.load(buffer_ref.at[rows], mask=(rows >= 0) & (rows < size), other=0)
