"""The Pallas kernel of kernels/sample.py; that module's wrapper says what the arguments are.

One program a row walks the vocabulary in blocks: once for the largest logit and the normaliser, and once to draw. Rows
with top_k or top_p walk it in between, for the cut: two bits of its place in the floats' order a walk. Greedy rows stop
after the first walk. Counts and sums are kept one a lane and added up at a walk's end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxoverlap.kernels.backend import triton_params
from jaxoverlap.kernels.noise import CEILING, gumbel, step_key

if TYPE_CHECKING:
    from jaxoverlap.kernels.sample import Adjustments, RowParams

_BLOCK = 4096
_FLOOR = -3.0e38  # below every finite logit that matters, yet finite: -inf less -inf is NaN
_BITS = 32
_NOT_AN_ID = jnp.iinfo(jnp.int32).max
_QUARTERS = 3  # thresholds tried in one walk


def sample(
    logits: jax.Array,
    params: RowParams,
    greedy: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    forced: jax.Array | None,
    adjustments: Adjustments | None,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """`greedy` bool [B]: rows that take their largest logit."""
    rows, vocab = logits.shape
    floats = jnp.stack([jnp.where(greedy, 1.0, params.temperature), params.top_p, params.min_p])
    seeds = lax.bitcast_convert_type(params.seed, jnp.int32)
    ints = jnp.stack([greedy.astype(jnp.int32), params.top_k, seeds, positions])
    optional = [x for x in (mask, forced) if x is not None]
    if adjustments is not None:
        optional += _inputs(adjustments)
    block = min(_BLOCK, pl.next_power_of_2(vocab))
    out = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
    has = {"has_mask": mask is not None, "has_forced": forced is not None, "adjusts": adjustments is not None}
    tokens, logprobs = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, block=block, **has),
        out_shape=out,
        grid=(rows,),
        compiler_params=triton_params(num_warps=16 if block == _BLOCK else 4, num_stages=1),
        interpret=interpret,
        name="sample",
    )(logits, floats, ints, *optional)
    return tokens, jnp.where(params.logprob, logprobs, 0.0)


def _kernel(
    logits_ref: Any,  # [B, V]
    floats_ref: Any,  # [3, B]: temperature, top_p, min_p
    ints_ref: Any,  # [4, B]: greedy, top_k, seed, position
    *refs: Any,  # mask [B, ceil(V / 32)], forced [B], those of _inputs, as far as there are any; tokens, logprobs [B]
    vocab: int,
    block: int,
    has_mask: bool,
    has_forced: bool,
    adjusts: bool,
) -> None:
    row = pl.program_id(0)
    temperature, top_p, min_p = (floats_ref[i, row] for i in range(3))
    greedy, top_k, seed, position = (ints_ref[i, row] for i in range(4))
    lane = jnp.arange(block, dtype=jnp.int32)
    blocks = pl.cdiv(vocab, block)

    def load(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Ids, logits and allowed logits of a block; -inf past the vocabulary."""
        ids = i * block + lane
        there = ids < vocab
        x = triton.load(logits_ref.at[row, ids], mask=there, other=-jnp.inf)
        allowed = _adjusted(x, ids, there, row, *refs[-7:-2]) if adjusts else x
        if has_mask:
            allowed = jnp.where(_bits(refs[0], row, ids, there) == 1, allowed, -jnp.inf)
        return ids, x, allowed

    best, top, normaliser = _survey(load, blocks, block)

    def scaled(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Ids, logits over the temperature, probabilities over the largest one, places in the floats' order."""
        ids, _, x = load(i)
        x = jnp.minimum(x / temperature, CEILING)
        return ids, x, jnp.exp(x - jnp.minimum(top / temperature, CEILING)), _order(x)

    by_k, by_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    wanted = (greedy == 0) & (by_k | by_p)
    walks = wanted.astype(jnp.int32) * blocks
    zeros = jnp.zeros((block,), jnp.float32)
    total = jnp.sum(lax.fori_loop(0, walks, lambda i, sums: sums + scaled(i)[2], zeros))
    limit_k = jnp.where(by_k, top_k, vocab + 1)
    limit_p = jnp.where(by_p, top_p * total, jnp.inf)
    cut = _search(scaled, walks, block, limit_k, limit_p)
    take = jnp.where(wanted, _ties_to_take(scaled, walks, block, cut, limit_k, limit_p), 0)

    key = step_key(lax.bitcast_convert_type(seed, jnp.uint32), position)

    def draw(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        value, token, seen = carry
        ids, x, weights, order = scaled(i)
        ties = (order == cut).astype(jnp.int32)
        within = (order > cut) | ((ties == 1) & (seen + jnp.cumsum(ties) <= take))
        kept = within & (x > -jnp.inf) & (weights >= min_p)
        noisy = jnp.where(kept, x + gumbel(key, ids), -jnp.inf)
        high = jnp.max(noisy)
        first = jnp.min(jnp.where(noisy == high, ids, _NOT_AN_ID))
        better = high > value
        return jnp.where(better, high, value), jnp.where(better, first, token), seen + jnp.sum(ties)

    start = jnp.float32(-jnp.inf), best, jnp.int32(0)
    token = lax.fori_loop(0, (1 - greedy) * blocks, draw, start)[1]
    if has_forced:
        forced = refs[has_mask][row]
        token = jnp.where(forced >= 0, forced, token)
    tokens_ref, logprobs_ref = refs[-2:]
    tokens_ref[row] = token
    logprobs_ref[row] = logits_ref[row, token] - normaliser


def _inputs(a: Adjustments) -> list[jax.Array]:
    floats = jnp.stack([a.frequency, a.presence, a.repetition])
    ints = jnp.stack([a.slots, a.needed.astype(jnp.int32), a.below_min.astype(jnp.int32)])
    return [floats, ints, a.counts, a.bias, a.stops]


def _adjusted(
    x: jax.Array,  # [block]
    ids: jax.Array,  # [block]
    there: jax.Array,  # [block]
    row: jax.Array,
    floats_ref: Any,  # [3, B]: frequency, presence, repetition
    ints_ref: Any,  # [3, B]: slot, needed, below the minimum
    counts_ref: Any,  # [R, V]
    bias_ref: Any,  # [R, V]
    stops_ref: Any,  # [R, ceil(V / 32)]
) -> jax.Array:
    """The block's logits as rows with adjustments have them; the others read nothing."""
    frequency, presence, repetition = (floats_ref[i, row] for i in range(3))
    slot, needed, below_min = (ints_ref[i, row] for i in range(3))
    read = there & (needed == 1)
    counts = triton.load(counts_ref.at[slot, ids], mask=read, other=0)
    occurred = counts > 0
    y = x - frequency * counts.astype(jnp.float32) - jnp.where(occurred, presence, 0.0)
    y = jnp.where(occurred, jnp.where(y < 0, y * repetition, y / repetition), y)
    y = y + triton.load(bias_ref.at[slot, ids], mask=read, other=0.0)
    return jnp.where(_bits(stops_ref, slot, ids, read & (below_min == 1)) == 1, -jnp.inf, y)


def _bits(words_ref: Any, row: jax.Array, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """int32 [block], each id's bit in a row of packed words; 0 outside the mask."""
    words = triton.load(words_ref.at[row, lax.div(ids, jnp.int32(_BITS))], mask=mask, other=0)
    return lax.shift_right_logical(words, lax.rem(ids, jnp.int32(_BITS))) & 1


def _survey(load: Callable[..., Any], blocks: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lowest id of the largest allowed logit, that logit, and the logarithm of the sum of all logits' exp."""

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, value, best = carry
        ids, x, allowed = load(i)
        high = jnp.maximum(peak, x)
        total = total * jnp.exp(peak - high) + jnp.exp(x - high)
        better = allowed > value
        return high, total, jnp.where(better, allowed, value), jnp.where(better, ids, best)

    floor = jnp.full((block,), _FLOOR, jnp.float32)
    start = floor, jnp.zeros_like(floor), jnp.full_like(floor, -jnp.inf), jnp.zeros((block,), jnp.int32)
    peak, total, value, best = lax.fori_loop(0, blocks, body, start)
    top, highest = jnp.max(value), jnp.max(peak)
    token = jnp.min(jnp.where(value == top, best, _NOT_AN_ID))
    return token, top, highest + jnp.log(jnp.sum(total * jnp.exp(peak - highest)))


def _search(
    scaled: Callable[..., Any], walks: jax.Array, block: int, limit_k: jax.Array, limit_p: jax.Array
) -> jax.Array:
    """The smallest place, uint32, above which there are less than `limit_k` ids and at most `limit_p` of weight; 0
    without walks."""

    def narrow(step: jax.Array, low: jax.Array) -> jax.Array:
        quarter = lax.shift_left(jnp.uint32(1), (_BITS - 2 - 2 * step).astype(jnp.uint32))
        cuts = [low + quarter * jnp.uint32(j + 1) - jnp.uint32(1) for j in range(_QUARTERS)]

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            _, _, weights, order = scaled(i)
            counts = [n + (order > c).astype(jnp.int32) for n, c in zip(carry[:_QUARTERS], cuts)]
            masses = [m + jnp.where(order > c, weights, 0.0) for m, c in zip(carry[_QUARTERS:], cuts)]
            return (*counts, *masses)

        start = [jnp.zeros((block,), jnp.int32)] * _QUARTERS + [jnp.zeros((block,), jnp.float32)] * _QUARTERS
        sums = lax.fori_loop(0, walks, body, tuple(start))
        for count, mass in zip(sums[:_QUARTERS], sums[_QUARTERS:]):
            holds = (jnp.sum(count) < limit_k) & (jnp.sum(mass) <= limit_p)
            low = low + jnp.where(holds, jnp.uint32(0), quarter)
        return low

    return lax.fori_loop(0, jnp.minimum(walks, 1) * (_BITS // 2), narrow, jnp.uint32(0))


def _ties_to_take(
    scaled: Callable[..., Any],
    walks: jax.Array,
    block: int,
    cut: jax.Array,
    limit_k: jax.Array,
    limit_p: jax.Array,
) -> jax.Array:
    """How many of the ids right at the cut are kept: as many as the limits have room for."""

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        count, mass, each = carry
        _, _, weights, order = scaled(i)
        above = order > cut
        each = jnp.maximum(each, jnp.where(order == cut, weights, 0.0))
        return count + above.astype(jnp.int32), mass + jnp.where(above, weights, 0.0), each

    zeros = jnp.zeros((block,), jnp.float32)
    count, mass, each = lax.fori_loop(0, walks, body, (jnp.zeros((block,), jnp.int32), zeros, zeros))
    weight = jnp.max(each)
    room = jnp.where(weight > 0, (limit_p - jnp.sum(mass)) / jnp.where(weight > 0, weight, 1.0), jnp.inf)
    by_p = jnp.minimum(room, 1.0e9).astype(jnp.int32) + 1
    return jnp.minimum(limit_k - jnp.sum(count), by_p)


def _order(x: jax.Array) -> jax.Array:
    """uint32 in the order of the floats, above 0; equal floats (both zeros) get equal numbers."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    negative = bits >= jnp.uint32(1 << 31)
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))
