"""Sampling on constant logits, against a float64 reference that sorts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxoverlap.kernels.noise import gumbel, step_key
from jaxoverlap.kernels.sample import RowParams, sample

OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": -1, "seed": 0, "logprob": True}
IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@functools.partial(jax.jit, static_argnames="implementation")
def jitted(logits, params, *rest, implementation):
    return sample(logits, RowParams(*params), *rest, implementation=implementation)


@pytest.fixture(params=IMPLEMENTATIONS)
def draw(request):
    return functools.partial(draw_with, request.param)


def draw_with(implementation, logits, rows, positions, mask=None, forced=None):
    """rows: parameter dicts -> tokens, logprobs."""
    rows = [{**OFF, **r} for r in rows]
    dtypes = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "top_k": np.int32, "seed": np.uint32}
    dtypes["logprob"] = np.bool_
    params = tuple(np.array([r[name] for r in rows], dtype) for name, dtype in dtypes.items())
    rest = () if mask is None and forced is None else (mask, forced)
    out = jitted(
        np.asarray(logits, np.float32), params, np.asarray(positions, np.int32), *rest, implementation=implementation
    )
    return tuple(np.asarray(x) for x in out)


def distribution(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """float64 probabilities of each id by a stable sort, as SGLang filters: all over the same full softmax."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    ranked = p[order]
    keep = np.ones(len(p), bool)
    if top_k > 0:
        keep &= np.arange(len(p)) < top_k
    if top_p < 1:
        keep &= np.cumsum(ranked) - ranked <= top_p
    keep &= ranked >= ranked[0] * min_p
    out = np.zeros(len(p))
    out[order[keep]] = ranked[keep] / ranked[keep].sum()
    return out


LOGITS = np.random.default_rng(7).normal(0, 2, 40).astype(np.float32)
LOGITS[11] = LOGITS[3] = LOGITS.max() - 0.5  # a tie among the likely ones


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        {"top_k": 3, "top_p": 0.99},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.15},
        {"temperature": 3.0, "top_k": 25, "min_p": 0.2},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(draw, params):
    n = 4096 if draw.args == ("interpret",) else 20_000
    tokens, logprobs = draw(np.tile(LOGITS, (n, 1)), [{**params, "seed": 5}] * n, np.arange(n))
    expected = distribution(LOGITS, **params)
    counts = np.bincount(tokens, minlength=40)
    assert not counts[expected == 0].any()
    likely = expected * n >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * n
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3
    # Log-probabilities are the model's own, before temperature and cuts.
    np.testing.assert_allclose(logprobs, np.log(distribution(LOGITS))[tokens], atol=1e-5)


def test_log_probabilities_only_where_wanted(draw):
    rows = [{"logprob": wanted} for wanted in (True, False, True, False)]
    tokens, logprobs = draw(np.tile(LOGITS, (4, 1)), rows, np.arange(4))
    expected = np.log(distribution(LOGITS))[tokens] * [1, 0, 1, 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    again, none = draw(np.tile(LOGITS, (4, 1)), [{"logprob": False}] * 4, np.arange(4))
    assert again.tolist() == tokens.tolist()
    assert not none.any()


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_a_logit_beyond_all_measure_is_drawn(draw, params):
    """Over a temperature below 1 it would be infinite, and its distance from itself no number."""
    logits = np.tile(LOGITS, (3, 1))
    logits[0, 7], logits[1, 7], logits[2, [7, 9]] = 3.4e38, 1e38, 3.4e38
    tokens, _ = draw(logits, [{**params, "temperature": 0.3, "seed": i} for i in range(3)], np.arange(3))
    assert tokens[:2].tolist() == [7, 7]
    assert tokens[2] in (7, 9)


@pytest.mark.parametrize("seed_of_case", range(6))
def test_kept_ids_are_the_references(draw, seed_of_case):
    """Over many draws from flat-ish logits exactly the kept ids turn up, ties at the cut included."""
    rng = np.random.default_rng(seed_of_case)
    logits = rng.integers(0, 3, 12).astype(np.float32) * 0.5  # many ties
    params = {"top_k": int(rng.integers(2, 9)), "top_p": float(rng.uniform(0.3, 0.95)), "min_p": 0.2}
    tokens, _ = draw(np.tile(logits, (1024, 1)), [params] * 1024, np.arange(1024))
    assert set(tokens.tolist()) == set(np.flatnonzero(distribution(logits, **params)).tolist())


def test_one_batch_of_different_rows_in_every_order(draw):
    """Greedy, top_k 1, a tiny top_p and a seeded row; two tied maxima. No row follows another's parameters."""
    logits = np.full(64, -1.0, np.float32)
    logits[[9, 41]] = 3.0
    rows = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"seed": 5}]
    positions = [17, 18, 19, 20]
    solo = [draw(logits[None], [r], [p])[0][0] for r, p in zip(rows, positions)]
    assert solo[:3] == [9, 9, 9]
    for order in itertools.permutations(range(4)):
        tokens, _ = draw(np.tile(logits, (4, 1)), [rows[i] for i in order], [positions[i] for i in order])
        assert tokens.tolist() == [solo[i] for i in order]
    seeded = draw(np.tile(logits, (64, 1)), [rows[3]] * 64, np.arange(64))[0]
    assert len(set(seeded.tolist())) > 2  # the seeded row does sample


def test_noise_comes_from_seed_and_position_alone(draw):
    uniform = np.zeros((8, 1000), np.float32)

    def run(seed, row, others):
        rows = [{"seed": s} for s in others]
        rows[row] = {"seed": seed}
        out = []
        for position in range(64):
            at = np.full(8, position + 3)
            at[row] = position
            out.append(int(draw(uniform, rows, at)[0][row]))
        return out

    seven = run(7, 0, range(100, 108))
    assert len(set(seven)) > 40
    assert run(7, 3, range(200, 208)) == seven
    alone = [int(draw(uniform[:1], [{"seed": 7}], [p])[0][0]) for p in range(64)]
    assert alone == seven
    eight = run(8, 0, range(100, 108))
    assert sum(a == b for a, b in zip(seven, eight)) < 5
    large = run(2**32 - 1, 0, range(8))
    assert sum(a == b for a, b in zip(seven, large)) < 5


def test_masks(draw):
    """Only allowed ids come out, in greedy and in sampled rows; a full mask changes nothing."""
    rng = np.random.default_rng(1)
    vocab = 70
    logits = rng.normal(0, 1, (6, vocab)).astype(np.float32)
    allowed = rng.random((6, vocab)) < 0.1
    allowed[:, 69] = True
    allowed[5] = True
    words = np.zeros((6, 3 * 32), bool)
    words[:, :vocab] = allowed
    mask = np.packbits(words, axis=1, bitorder="little").view(np.int32)
    rows = [{"temperature": 0.0}] * 2 + [{"seed": 3, "top_k": 50}] * 4
    forced = np.full(6, -1, np.int32)
    for position in range(20):
        tokens, logprobs = draw(logits, rows, [position] * 6, mask, forced)
        assert allowed[np.arange(6), tokens].all()
        best = np.where(allowed, logits, -np.inf).argmax(1)
        assert tokens[:2].tolist() == best[:2].tolist()
        free, _ = draw(logits, rows, [position] * 6)
        assert tokens[5] == free[5]
        x = logits.astype(np.float64)
        expected = x - np.log(np.exp(x).sum(1, keepdims=True))
        np.testing.assert_allclose(logprobs, expected[np.arange(6), tokens], atol=1e-5)


def test_forced_tokens(draw):
    logits = np.tile(LOGITS, (3, 1))
    mask = np.full((3, 2), -1, np.int32)
    tokens, logprobs = draw(logits, [{"temperature": 0.0}] * 3, [1, 2, 3], mask, np.array([8, -1, 0], np.int32))
    assert tokens.tolist() == [8, LOGITS.argmax(), 0]
    np.testing.assert_allclose(logprobs, np.log(distribution(LOGITS))[tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"), list(itertools.product((0.7, 1.6), (-1, 90), (1.0, 0.7), (0.0, 0.01)))
)
def test_the_kernel_draws_the_tokens_of_its_twin(temperature, top_k, top_p, min_p):
    """Same noise, same cuts; a vocabulary that ends within a block, with ties and ids of no probability."""
    rng = np.random.default_rng(top_k + 1)
    vocab, rows = 5003, 3
    logits = np.round(rng.normal(0, 3, (rows, vocab)), 2).astype(np.float32)
    logits[:, rng.integers(0, vocab, 40)] = -np.inf
    params = [
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": s} for s in range(rows)
    ]
    allowed = rng.integers(-(1 << 31), 1 << 31, (rows, -(-vocab // 32))).astype(np.int32)
    args = logits, params, rng.integers(0, 1 << 20, rows), allowed
    (tokens, logprobs), (expected, expected_logprobs) = (draw_with(i, *args) for i in ("interpret", "xla"))
    assert tokens.tolist() == expected.tolist()
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5)


def test_noise_is_that_of_jax():
    seeds, positions = np.array([0, 5, 2**32 - 1], np.uint32), np.array([0, 77, 131071], np.int32)
    for seed, position in zip(seeds, positions):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        got = gumbel(step_key(jnp.uint32(seed), jnp.int32(position)), jnp.arange(1000))
        np.testing.assert_allclose(got, jax.random.gumbel(key, (1000,)), rtol=1e-6)


def test_wrong_shapes_are_refused():
    ones = jnp.ones(2)
    params = RowParams(ones, ones, ones, jnp.ones(2, jnp.int32), jnp.ones(2, jnp.uint32), ones == 1)
    positions = jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="logits must be float32, not bfloat16"):
        sample(jnp.ones((2, 40), jnp.bfloat16), params, positions, implementation="xla")
    with pytest.raises(ValueError, match=r"mask must have shape \[2, 2\], not \[2, 1\]"):
        sample(jnp.ones((2, 40)), params, positions, jnp.ones((2, 1), jnp.int32), implementation="xla")
    with pytest.raises(ValueError, match=r"top_k must have shape \[3\]"):
        sample(
            jnp.ones((3, 40)),
            RowParams(*(jnp.ones(3),) * 3, params.top_k, params.seed, params.logprob),
            positions,
            implementation="xla",
        )
