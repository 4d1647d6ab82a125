"""Against products in float64, a row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.kernels.grouped_matmul import grouped_matmul

IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
COUNTS = {
    "even": [8, 8, 8],
    "one row each": [1, 1, 1, 1],
    "empty groups": [0, 19, 0, 0, 5, 0],
    "all in the last": [0, 0, 40],
    "many blocks": [70, 3, 200, 0, 64],
    "a single row": [0, 1],
    "one group": [33],
}


def arrays(counts, depth, width, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((sum(counts), depth)), dtype)
    return x, jnp.asarray(rng.standard_normal((len(counts), width, depth)), dtype), jnp.asarray(counts, jnp.int32)


def product(x, weights, counts):
    group = np.repeat(np.arange(len(counts)), counts)
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    return np.stack([weights[g] @ row for row, g in zip(x, group)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    ("depth", "width"), [pytest.param(64, 128, marks=pytest.mark.slow), (40, 24), (200, 70), (3, 1)]
)
def test_equals_float64(name, depth, width, dtype, implementation):
    x, weights, counts = arrays(COUNTS[name], depth, width, dtype)
    got = jax.jit(grouped_matmul, static_argnames="implementation")(x, weights, counts, implementation=implementation)
    assert got.dtype == dtype
    expected = product(x, weights, COUNTS[name])
    error = np.abs(np.asarray(got, np.float64) - expected).max() / max(1.0, np.abs(expected).max())
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_see_each_other(implementation):
    """NaN in one row stays there; where the groups end changes no bit of a row."""
    x, weights, _ = arrays([4, 20, 8], 40, 24, jnp.float32)
    weights = jnp.broadcast_to(weights[:1], weights.shape)
    one, other = (
        grouped_matmul(x.at[7].set(at), weights, jnp.asarray(counts, jnp.int32), implementation=implementation)
        for at, counts in ((jnp.nan, [4, 20, 8]), (0.0, [30, 0, 2]))
    )
    rest = np.arange(32) != 7
    assert np.isnan(one[7]).all()
    assert np.isfinite(one[rest]).all()
    if implementation != "xla":  # there a group's rows are summed together with the zeros of the others
        np.testing.assert_array_equal(one[rest], other[rest])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((4, 2, 3))}, r"x must have shape \[\?, \?\], not \[4, 2, 3\]"),
        ({"weights": jnp.zeros((2, 5, 4))}, r"weights must have shape \[\?, \?, 3\], not \[2, 5, 4\]"),
        ({"weights": jnp.zeros((2, 5, 3), jnp.bfloat16)}, "weights must be float32, not bfloat16"),
        ({"counts": jnp.zeros(3, jnp.int32)}, r"counts must have shape \[2\], not \[3\]"),
        ({"counts": jnp.zeros(2)}, "counts must be int32, not float32"),
        ({"implementation": "triton"}, "implementation must be one of pallas, xla, interpret, not 'triton'"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    given = {"x": jnp.zeros((4, 3)), "weights": jnp.zeros((2, 5, 3)), "counts": jnp.array([3, 1], jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{**given, "implementation": "xla", **change})
