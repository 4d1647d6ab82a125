"""Adjusted logits against a float64 reference, by what greedy rows then choose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.kernels.sample import Adjustments, RowParams, sample

IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
ROWS, SLOTS, VOCAB = 6, 9, 77


def packed_bits(ids):
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for i in ids:
        words[i // 32] |= np.uint32(1 << i % 32)
    return words.view(np.int32)


def case(seed):
    """Tables full of numbers, also for the rows that need none."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(np.arange(1, SLOTS))[:ROWS].astype(np.int32)
    stops = [rng.permutation(VOCAB)[:20].tolist() for _ in range(SLOTS)]
    return Adjustments(
        slots=slots,
        needed=rng.random(ROWS) < 0.7,
        frequency=rng.uniform(-2, 2, ROWS).astype(np.float32),
        presence=rng.uniform(-2, 2, ROWS).astype(np.float32),
        repetition=rng.uniform(0.3, 2, ROWS).astype(np.float32),
        below_min=rng.random(ROWS) < 0.5,
        counts=rng.integers(-2, 4, (SLOTS, VOCAB)).clip(0).astype(np.int32),
        bias=np.where(rng.random((SLOTS, VOCAB)) < 0.2, rng.normal(0, 3, (SLOTS, VOCAB)), 0).astype(np.float32),
        stops=np.stack([packed_bits(s) for s in stops]),
    ), stops


def reference(logits, a, stops):
    out = logits.astype(np.float64)
    for b in np.flatnonzero(a.needed):
        for t in range(VOCAB):
            count = int(a.counts[a.slots[b], t])
            if count:
                x = out[b, t] - float(a.frequency[b]) * count - float(a.presence[b])
                out[b, t] = x * float(a.repetition[b]) if x < 0 else x / float(a.repetition[b])
            out[b, t] += float(a.bias[a.slots[b], t])
            if a.below_min[b] and t in stops[a.slots[b]]:
                out[b, t] = -np.inf
    return out


@functools.partial(jax.jit, static_argnames="implementation")
def chosen(logits, fields, mask, implementation):
    zeros, ones = jnp.zeros(ROWS, jnp.float32), jnp.ones(ROWS, jnp.float32)
    params = RowParams(zeros, ones, zeros, jnp.full(ROWS, -1, jnp.int32), jnp.zeros(ROWS, jnp.uint32), zeros == 0)
    positions = jnp.zeros(ROWS, jnp.int32)
    return sample(logits, params, positions, mask, None, Adjustments(**fields), implementation=implementation)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_rows_take_the_best_adjusted_logit(implementation, masked):
    for seed in range(12):
        logits = np.random.default_rng(100 + seed).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
        a, stops = case(seed)
        expected, mask = reference(logits, a, stops), None
        if masked:  # the first 40 ids only, whatever their bias
            mask = np.broadcast_to(packed_bits(range(40)), (ROWS, 3))
            expected[:, 40:] = -np.inf
        best = np.sort(expected, axis=1)
        assert np.all(best[:, -1] - best[:, -2] > 1e-4), "a case without ties"
        tokens, logprobs = chosen(logits, vars(a), mask, implementation)
        np.testing.assert_array_equal(tokens, expected.argmax(1))
        x = logits.astype(np.float64)
        normaliser = np.log(np.exp(x).sum(1))  # log-probabilities are of the unchanged logits
        np.testing.assert_allclose(logprobs, x[np.arange(ROWS), tokens] - normaliser, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_need_none_are_untouched_by_their_tables(implementation):
    a, _ = case(3)
    fields = {**vars(a), "needed": np.zeros(ROWS, bool), "bias": np.full((SLOTS, VOCAB), np.nan, np.float32)}
    logits = np.random.default_rng(0).normal(0, 2, (ROWS, VOCAB)).astype(np.float32)
    tokens, _ = chosen(logits, fields, None, implementation)
    np.testing.assert_array_equal(tokens, logits.argmax(1))


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("counts", np.zeros((SLOTS, VOCAB + 1), np.int32), "counts"),
        ("bias", np.zeros((SLOTS, VOCAB), np.int32), "bias"),
        ("stops", np.zeros((SLOTS, 2), np.int32), "stops"),
        ("frequency", np.zeros(ROWS + 1, np.float32), "frequency"),
    ],
)
def test_other_shapes_are_refused(name, value, part):
    a, _ = case(0)
    with pytest.raises(ValueError, match=part):
        chosen(np.zeros((ROWS, VOCAB), np.float32), {**vars(a), name: value}, None, "xla")
