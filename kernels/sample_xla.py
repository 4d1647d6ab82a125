"""The XLA twin of kernels/sample.py; that module's wrapper says what the arguments are."""

from __future__ import annotations

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
    """bool [B, V]. The search runs only if a row needs it; what a row gets does not depend on that."""
    vocab = scaled.shape[1]
    relative = scaled - scaled.max(-1, keepdims=True)
    weights = jnp.exp(relative)  # probabilities over the largest one
    by_k = (params.top_k > 0) & (params.top_k < vocab) & ~greedy
    by_p = (params.top_p < 1.0) & ~greedy
    limit_k = jnp.where(by_k, params.top_k, vocab + 1)
    limit_p = jnp.where(by_p, params.top_p * weights.sum(-1), jnp.inf)
    wanted = by_k | by_p
    ranks = vocab - 1 - jnp.arange(vocab, dtype=jnp.int32)  # among equals the lower id comes first

    def search(_i: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """`numbers` int32 [B, V] grow towards the front of the ids' order; that of the last kept id is in low..high.
        Gives numbers that tell apart those that shared that one, and -1 to what is not kept, with their low..high."""
        numbers, low, high = carry

        def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
            before = numbers > middle[:, None]
            holds = (before.sum(-1) < limit_k) & (jnp.where(before, weights, 0.0).sum(-1) <= limit_p)
            return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

        _, cut = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
        equal = numbers == cut[:, None]
        several = wanted & (equal.sum(-1) > 1)
        numbers = jnp.where(numbers > cut[:, None], vocab, jnp.where(equal, ranks, -1))
        return numbers, jnp.zeros_like(cut), jnp.where(several, vocab - 1, 0)

    order = _ordered(scaled)
    low = jnp.full(limit_k.shape, _LOWEST)
    high = jnp.where(wanted, order.max(-1), _LOWEST)
    numbers, _, _ = lax.fori_loop(0, 2, search, (order, low, high))  # by logit, then by id
    return (relative > -jnp.inf) & (weights >= params.min_p[:, None]) & (numbers >= 0)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 in the order of the floats; equal floats (both zeros) get equal numbers."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
