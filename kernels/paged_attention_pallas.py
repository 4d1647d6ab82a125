"""The Pallas kernels of kernels/paged_attention.py; that module's wrappers say what the arguments are.

Decode splits each row's KV into parts, one program each, and combines their softmaxes afterwards, so that few rows with
long contexts still fill the device (Flash-Decoding, Dao et al. 2023). Extend gives each block of a row's query tokens
and each head a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxoverlap.kernels.backend import dot, triton_params

MASKED = -1e30
_FILL = 264  # programs that fill the device: two for each of an H200's 132 multiprocessors
_LEAST_PART = 256  # tokens of KV that are worth a part of their own
_MIN_ROWS = 16  # of a matrix product in Triton
_Q_BLOCK = 64


class _Shape(NamedTuple):
    """What the kernels know of the arrays; `lanes` is the head size padded to a power of two."""

    heads: int
    group: int  # query heads of one KV head
    dim: int
    lanes: int
    page_size: int
    scale: float
    width: int  # tokens of KV in one block


class _Running(NamedTuple):
    """Softmax over the KV seen so far."""

    out: jax.Array  # f32 [M, lanes], sum of weighted values
    peak: jax.Array  # f32 [M], largest score
    total: jax.Array  # f32 [M], sum of exp(score - peak)


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
    kv_block: int | None,
    splits: int | None,
    interpret: bool,
) -> jax.Array:
    shape = _shape(q, keys, page_size, scale, kv_block)
    rows, kv_heads = q.shape[0], keys.shape[1]
    if splits is None:
        splits = choose_splits(rows * kv_heads, page_table.shape[1] * page_size)
    outs: Any = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if splits > 1:
        parts = (rows, splits, shape.heads)
        outs = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*parts, shape.dim), parts, parts))
    got = pl.pallas_call(
        functools.partial(_decode_kernel, shape=shape, splits=splits),
        out_shape=outs,
        grid=(rows, kv_heads, splits),
        compiler_params=triton_params(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(q, keys, values, page_table, seq_lens, first_loc[None])
    return got if splits == 1 else _combine(*got).astype(q.dtype)


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
    kv_block: int | None,
    interpret: bool,
) -> jax.Array:
    shape = _shape(q, keys, page_size, scale, kv_block)
    tokens, rows = q.shape[0], page_table.shape[0]
    largest = _Q_BLOCK if q.dtype.itemsize < 4 else _MIN_ROWS  # float32 products take more registers
    block = max(_MIN_ROWS, min(largest, pl.next_power_of_2(tokens)))
    # Padding tokens, behind the others, are one more row: it has nothing to look at, and so comes out as zeros.
    real = jnp.sum(extend_lens, dtype=jnp.int32)
    seq_lens, q_starts, extend_lens = (
        jnp.append(x, last) for x, last in ((seq_lens, 0), (q_starts, real), (extend_lens, tokens - real))
    )
    blocks = (extend_lens + block - 1) // block  # query blocks of each row
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    index = jnp.arange(
        min(tokens, tokens // block + rows + 1), dtype=jnp.int32
    )  # so many at most, whatever the lengths
    row = jnp.minimum(jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32), rows)
    offset = (index - ends[row] + blocks[row]) * block  # into the row's own tokens; past its end: nothing to do
    lens = jnp.stack([row, offset, seq_lens[row], q_starts[row], extend_lens[row]])
    return pl.pallas_call(
        functools.partial(_extend_kernel, shape=shape, block=block),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(index.shape[0], shape.heads),
        compiler_params=triton_params(num_warps=8 if shape.lanes > 128 else 4, num_stages=2),
        interpret=interpret,
        name="extend_attention",
    )(q, keys, values, page_table, lens, first_loc[None])


def choose_splits(programs: int, tokens: int) -> int:
    """Parts for rows of up to `tokens` of KV, where there is one program a row and KV head already: a power of two,
    from the shapes alone, so that a row's result does not depend on the others."""
    wanted = pl.next_power_of_2(pl.cdiv(_FILL, programs))
    return max(1, min(wanted, pl.next_power_of_2(pl.cdiv(tokens, _LEAST_PART))))


def _decode_kernel(
    q_ref: Any,  # [B, Hq, D]
    keys_ref: Any,  # [N, Hkv, D]
    values_ref: Any,  # [N, Hkv, D]
    table_ref: Any,  # [B, P]
    lens_ref: Any,  # [B]
    first_ref: Any,  # [1]
    out_ref: Any,  # [B, Hq, D], or f32 [B, splits, Hq, D], not divided by the total
    *parts: Any,  # peaks and totals f32 [B, splits, Hq]
    shape: _Shape,
    splits: int,
) -> None:
    row, kv_head, split = (pl.program_id(i) for i in range(3))
    rows = max(_MIN_ROWS, pl.next_power_of_2(shape.group))
    lane = jnp.arange(rows, dtype=jnp.int32)
    heads, mine = kv_head * shape.group + lane, lane < shape.group
    columns = jnp.arange(shape.lanes, dtype=jnp.int32)
    mask = mine[:, None] & (columns < shape.dim)[None]
    q = triton.load(q_ref.at[row, heads[:, None], columns[None]], mask=mask, other=0)  # [rows, lanes]
    length = lens_ref[row]
    part = pl.cdiv(pl.cdiv(length, splits), shape.width) * shape.width
    start = split * part
    end = jnp.minimum(start + part, length)

    def body(i: jax.Array, running: _Running) -> _Running:
        positions = start + i * shape.width + jnp.arange(shape.width, dtype=jnp.int32)
        seen = positions < end
        k, v = _load(keys_ref, values_ref, table_ref, row, first_ref[0], kv_head, positions, seen, columns, shape)
        return _attend(running, q, k, v, jnp.broadcast_to(seen[None], (rows, shape.width)), shape.scale)

    turns = pl.cdiv(jnp.maximum(end - start, 0), shape.width)
    out, peak, total = lax.fori_loop(0, turns, body, _start(rows, shape.lanes))
    if splits == 1:
        result = (out / jnp.where(total > 0, total, 1.0)[:, None]).astype(out_ref.dtype)
        triton.store(out_ref.at[row, heads[:, None], columns[None]], result, mask=mask)
        return
    triton.store(out_ref.at[row, split, heads[:, None], columns[None]], out, mask=mask)
    for ref, value in zip(parts, (peak, total)):
        triton.store(ref.at[row, split, heads], value, mask=mine)


def _combine(outs: jax.Array, peaks: jax.Array, totals: jax.Array) -> jax.Array:
    """outs f32 [B, splits, Hq, D], peaks and totals f32 [B, splits, Hq] -> f32 [B, Hq, D]."""
    weights = jnp.exp(peaks - peaks.max(1, keepdims=True))
    total = (totals * weights).sum(1)
    return (outs * weights[..., None]).sum(1) / jnp.where(total > 0, total, 1.0)[..., None]


def _extend_kernel(
    q_ref: Any,  # [T, Hq, D]
    keys_ref: Any,  # [N, Hkv, D]
    values_ref: Any,  # [N, Hkv, D]
    table_ref: Any,  # [B, P]
    lens_ref: Any,  # [5, blocks]: row, offset into its tokens, length, first token, tokens of this step
    first_ref: Any,  # [1]
    out_ref: Any,  # [T, Hq, D]
    *,
    shape: _Shape,
    block: int,
) -> None:
    index, head = pl.program_id(0), pl.program_id(1)
    row, offset, length, first_token, tokens = (lens_ref[i, index] for i in range(5))
    lane = jnp.arange(block, dtype=jnp.int32)
    columns = jnp.arange(shape.lanes, dtype=jnp.int32)
    at = (first_token + offset + lane)[:, None], head, columns[None]
    mask = (offset + lane < tokens)[:, None] & (columns < shape.dim)[None]
    q = triton.load(q_ref.at[at], mask=mask, other=0)  # [block, lanes]
    first_position = length - tokens + offset
    end = jnp.where(offset < tokens, jnp.clip(first_position + block, 0, length), 0)

    def body(i: jax.Array, running: _Running) -> _Running:
        positions = i * shape.width + jnp.arange(shape.width, dtype=jnp.int32)
        there = positions < end
        where = (first_ref[0], head // shape.group, positions, there, columns, shape)
        k, v = _load(keys_ref, values_ref, table_ref, row, *where)
        seen = there[None] & (positions[None] <= (first_position + lane)[:, None])
        return _attend(running, q, k, v, seen, shape.scale)

    out, _peak, total = lax.fori_loop(0, pl.cdiv(end, shape.width), body, _start(block, shape.lanes))
    result = out / jnp.where(total > 0, total, 1.0)[:, None]
    triton.store(out_ref.at[at], result.astype(out_ref.dtype), mask=mask)


def _load(
    keys_ref: Any,
    values_ref: Any,
    table_ref: Any,
    row: jax.Array,
    first_loc: jax.Array,
    kv_head: jax.Array,
    positions: jax.Array,
    seen: jax.Array,
    columns: jax.Array,
    shape: _Shape,
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [width, lanes] of `positions` [width]; zeros where they are not `seen`."""
    page = lax.div(positions, jnp.int32(shape.page_size))
    pages = triton.load(table_ref.at[row, page], mask=seen, other=0)
    locs = first_loc + pages * shape.page_size + lax.rem(positions, jnp.int32(shape.page_size))
    at = locs[:, None], kv_head, columns[None]
    mask = seen[:, None] & (columns < shape.dim)[None]
    return triton.load(keys_ref.at[at], mask=mask, other=0), triton.load(values_ref.at[at], mask=mask, other=0)


def _attend(running: _Running, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, scale: float) -> _Running:
    """One block of KV. q [M, lanes], k and v [width, lanes], seen [M, width]."""
    scores = jnp.where(seen, dot(q, k.T) * scale, MASKED)
    peak = jnp.maximum(running.peak, scores.max(1))
    weights = jnp.where(seen, jnp.exp(scores - peak[:, None]), 0.0)
    shrink = jnp.exp(running.peak - peak)
    out = running.out * shrink[:, None] + dot(weights.astype(v.dtype), v)
    return _Running(out, peak, running.total * shrink + weights.sum(1))


def _start(rows: int, lanes: int) -> _Running:
    return _Running(jnp.zeros((rows, lanes), jnp.float32), jnp.full((rows,), MASKED), jnp.zeros((rows,), jnp.float32))


def _shape(q: jax.Array, keys: jax.Array, page_size: int, scale: float, kv_block: int | None) -> _Shape:
    heads, dim = q.shape[1:]
    lanes = max(_MIN_ROWS, pl.next_power_of_2(dim))
    width = kv_block or max(16, min(64, 16384 // (lanes * keys.dtype.itemsize)))
    return _Shape(heads, heads // keys.shape[1], dim, lanes, page_size, scale, width)
