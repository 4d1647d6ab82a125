"""Sampling: one token a row, from that row's logits, parameters, seed and position alone.

The kept ids are a prefix of the ids in order of falling logit, the lower id first among equals, as SGLang's joint rule:
at most `top_k` of them; while the probability of those before is at most `top_p`; and at least `min_p` times the
largest probability; probabilities are those of the whole row after temperature. One kept id is then drawn by Gumbel's
trick with a key folded from (seed, position). Thresholds are found by searching the floats' bits, not by a sort.

Rows with adjustments have their logits changed first, in SGLang's order: an id that occurred c > 0 times loses
`frequency` * c and `presence`, is then divided (if negative, multiplied) by `repetition`; every id gains its bias; and
stop ids are forbidden below the minimum. The mask comes last.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxoverlap.kernels import sample_pallas as pallas
from jaxoverlap.kernels import sample_xla as xla
from jaxoverlap.kernels.backend import Implementation, check_implementation, check_shape
from jaxoverlap.sampling_params import GREEDY_TEMPERATURE


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of a batch's rows, each [B]."""

    temperature: jax.Array  # f32
    top_p: jax.Array  # f32
    min_p: jax.Array  # f32
    top_k: jax.Array  # int32, below 1: off
    seed: jax.Array  # uint32
    logprob: jax.Array  # bool, whether the row's log-probability is wanted


@dataclass(frozen=True)
class Adjustments:
    """What changes the logits of a batch of B rows before they are sampled: tables by request slot, R of them, of which
    row b has `slots[b]`. Where `needed` is False a row's logits stay as they are, whatever its table rows hold."""

    slots: jax.Array  # int32 [B]
    needed: jax.Array  # bool [B]
    frequency: jax.Array  # f32 [B]
    presence: jax.Array  # f32 [B]
    repetition: jax.Array  # f32 [B], above 0
    below_min: jax.Array  # bool [B], stop ids are forbidden
    counts: jax.Array  # int32 [R, V], occurrences of each id
    bias: jax.Array  # f32 [R, V]
    stops: jax.Array  # int32 [R, ceil(V / 32)], bits of the stop ids, packed as a mask's


def sample(
    logits: jax.Array,
    params: RowParams,
    positions: jax.Array,
    mask: jax.Array | None = None,
    forced: jax.Array | None = None,
    adjustments: Adjustments | None = None,
    *,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its log-probability under the unchanged logits (0 where not wanted): int32 [B], f32 [B].

    logits f32 [B, V]; positions int32 [B] of the tokens to come; mask int32 [B, ceil(V / 32)], bit i % 32 of word i //
    32 allows id i; forced int32 [B], the row's token where not negative.

    Greedy rows (temperature below 1e-6, or top_k 1) take the largest logit, the lowest id among equals; a device that
    flushes denormal numbers takes them for zeros. The implementations add the row's probabilities up in different
    orders: where a sum meets top_p to within rounding, the id at the cut may differ. Raises ValueError for other shapes
    or dtypes.
    """
    check_implementation(implementation)
    check_shape("logits", logits, (None, None), jnp.float32)
    rows, vocab = logits.shape
    for name, dtype in (("temperature", "float32"), ("top_p", "float32"), ("min_p", "float32"), ("top_k", "int32")):
        check_shape(name, getattr(params, name), (rows,), dtype)
    check_shape("seed", params.seed, (rows,), jnp.uint32)
    check_shape("logprob", params.logprob, (rows,), jnp.bool_)
    check_shape("positions", positions, (rows,), jnp.int32)
    if mask is not None:
        check_shape("mask", mask, (rows, -(-vocab // 32)), jnp.int32)
    if forced is not None:
        check_shape("forced", forced, (rows,), jnp.int32)
    if adjustments is not None:
        _check_adjustments(adjustments, rows, vocab)
    greedy = (params.temperature < GREEDY_TEMPERATURE) | (params.top_k == 1)
    if implementation == "xla":
        return xla.sample(logits, params, greedy, positions, mask, forced, adjustments)
    interpret = implementation == "interpret"
    return pallas.sample(logits, params, greedy, positions, mask, forced, adjustments, interpret=interpret)


def _check_adjustments(a: Adjustments, rows: int, vocab: int) -> None:
    dtypes = {"slots": "int32", "needed": "bool", "below_min": "bool"}
    for name in ("slots", "needed", "frequency", "presence", "repetition", "below_min"):
        check_shape(name, getattr(a, name), (rows,), dtypes.get(name, "float32"))
    slots = a.counts.shape[0]
    check_shape("counts", a.counts, (slots, vocab), jnp.int32)
    check_shape("bias", a.bias, (slots, vocab), jnp.float32)
    check_shape("stops", a.stops, (slots, -(-vocab // 32)), jnp.int32)
