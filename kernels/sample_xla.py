"""The XLA twin of kernels/sample.py; that module's wrapper says what the arguments are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.kernels.noise import CEILING, gumbel, step_key

if TYPE_CHECKING:
    from jaxoverlap.kernels.sample import Adjustments, RowParams

_BITS = 32
_LOWEST = jnp.iinfo(jnp.int32).min


def sample(
    logits: jax.Array,
    params: RowParams,
    greedy: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    forced: jax.Array | None,
    adjustments: Adjustments | None,
) -> tuple[jax.Array, jax.Array]:
    """`greedy` bool [B]: rows that take their largest logit."""
    allowed = logits
    if adjustments is not None:
        a = adjustments  # the tables are read only if a row needs them
        allowed = lax.cond(jnp.any(a.needed), lambda: _adjusted(logits, a), lambda: logits)
    if mask is not None:
        allowed = jnp.where(unpack_mask(mask, logits.shape[1]), allowed, -jnp.inf)
    best = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    drawn = lax.cond(jnp.all(greedy), lambda: best, lambda: _draw(allowed, params, positions, greedy))
    tokens = jnp.where(greedy, best, drawn)
    if forced is not None:
        tokens = jnp.where(forced >= 0, forced, tokens)
    wanted = jnp.any(params.logprob)  # the sum over the vocabulary is a few percent of a small model's step on a CPU
    logprobs = lax.cond(wanted, lambda: _logprobs(logits, tokens), lambda: jnp.zeros(tokens.shape, jnp.float32))
    return tokens, jnp.where(params.logprob, logprobs, 0.0)


def _logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _adjusted(logits: jax.Array, a: Adjustments) -> jax.Array:
    counts = a.counts[a.slots]
    there = counts > 0
    x = logits - a.frequency[:, None] * counts - jnp.where(there, a.presence[:, None], 0.0)
    repetition = a.repetition[:, None]
    x = jnp.where(there, jnp.where(x < 0, x * repetition, x / repetition), x) + a.bias[a.slots]
    forbidden = a.below_min[:, None] & unpack_mask(a.stops[a.slots], logits.shape[1])
    return jnp.where(a.needed[:, None], jnp.where(forbidden, -jnp.inf, x), logits)


def unpack_mask(mask: jax.Array, vocab_size: int) -> jax.Array:
    """bool [B, V] from packed bits int32 [B, ceil(V / 32)]."""
    bits = (mask[:, :, None] >> jnp.arange(_BITS, dtype=jnp.int32)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] == 1


def _draw(logits: jax.Array, params: RowParams, positions: jax.Array, greedy: jax.Array) -> jax.Array:
    scaled = jnp.minimum(logits / jnp.where(greedy, 1.0, params.temperature)[:, None], CEILING)
    keys = step_key(params.seed[:, None], positions[:, None])
    noise = gumbel(keys, jnp.arange(logits.shape[1], dtype=jnp.int32)[None])
    kept = _kept(scaled, params, greedy)
    return jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)


def _kept(scaled: jax.Array, params: RowParams, greedy: jax.Array) -> jax.Array:
    """bool [B, V]. The loops run only if a row needs them; what a row gets does not depend on that."""
    vocab = scaled.shape[1]
    relative = scaled - scaled.max(-1, keepdims=True)
    weights = jnp.exp(relative)  # probabilities over the largest one
    kept = (relative > -jnp.inf) & (weights >= params.min_p[:, None])
    order = _ordered(scaled)
    lowest = jnp.full(order.shape[:1], _LOWEST)
    by_k = (params.top_k > 0) & (params.top_k < vocab) & ~greedy
    by_p = (params.top_p < 1.0) & ~greedy
    limit_k = jnp.where(by_k, params.top_k, vocab + 1)
    limit_p = jnp.where(by_p, params.top_p * weights.sum(-1), jnp.inf)

    def before(cut: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Number and weight of the ids above the cut."""
        above = order > cut[:, None]
        return above.sum(-1), jnp.where(above, weights, 0.0).sum(-1)

    def holds(cut: jax.Array) -> jax.Array:
        count, mass = before(cut)
        return (count < limit_k) & (mass <= limit_p)

    wanted = by_k | by_p
    cut = _smallest(holds, lowest, order.max(-1), _BITS, jnp.any(wanted))
    cut = jnp.where(wanted, cut, lowest)
    count, mass = before(cut)
    ties = order == cut[:, None]
    each = jnp.where(ties, weights, 0.0).max(-1)  # weight of each id at the cut
    ties_p = jnp.where(each > 0, (limit_p - mass) / jnp.where(each > 0, each, 1.0), jnp.inf)
    ties_p = jnp.minimum(ties_p, vocab).astype(jnp.int32) + 1
    return kept & ((order > cut[:, None]) | _first(ties, jnp.minimum(limit_k - count, ties_p)))


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of the floats; equal floats (both zeros) get equal numbers."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _smallest(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, steps: int, wanted: jax.Array
) -> jax.Array:
    """Smallest int32 in low..high (each [B]) from which on `holds`, in `steps` halvings; `high` unless `wanted`."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        held = holds(middle)
        return jnp.where(held, low, middle + 1), jnp.where(held, middle, high)

    return lax.fori_loop(0, jnp.where(wanted, steps, 0), halve, (low, high))[1]


def _first(ties: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` [B] set entries of each row of `ties` bool [B, V]."""
    ids = jnp.arange(ties.shape[1], dtype=jnp.int32)
    low, high = jnp.zeros_like(count), jnp.full_like(count, ties.shape[1])
    end = _smallest(
        lambda end: (ties & (ids < end[:, None])).sum(-1) >= count,
        low,
        high,
        ties.shape[1].bit_length(),
        jnp.any(ties.sum(-1) > count),
    )
    return ties & (ids < end[:, None])
