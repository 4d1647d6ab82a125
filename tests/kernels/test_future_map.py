import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.kernels.future_map import gather, scatter, take

IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_rows_never_undo_a_real_write(implementation):
    step = jax.jit(lambda *a: scatter(*a, implementation=implementation))
    for padding in range(18):
        buffer = jnp.array([7, 0, 127, 264, 999], jnp.int32)  # row 0 is the padding row
        rows = jnp.array([1, 4] + [0] * padding, jnp.int32)
        values = jnp.array([11, 22] + [555] * padding, jnp.int32)
        assert step(buffer, rows, values)[1:].tolist() == [11, 127, 264, 22]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.parametrize(("size", "batch"), [(2, 1), (17, 16), (40, 33), (100, 64)])
def test_scatter_and_gather_are_numpys(implementation, dtype, size, batch):
    rng = np.random.default_rng(size)
    buffer = rng.integers(0, 1000, size).astype(dtype)
    rows = rng.permutation(np.arange(1, size))[:batch].astype(np.int32)
    values = rng.integers(0, 1000, len(rows)).astype(dtype)
    expected = buffer.copy()
    expected[rows] = values
    out = scatter(jnp.array(buffer), jnp.array(rows), jnp.array(values), implementation=implementation)
    # The wrapper's own padding to a power of two names row 0.
    np.testing.assert_array_equal(out[1:], expected[1:])
    read = rng.integers(0, size, batch).astype(np.int32)
    got = gather(jnp.array(buffer), jnp.array(read), implementation=implementation)
    np.testing.assert_array_equal(got, buffer[read])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_outside_the_map(implementation):
    buffer = jnp.arange(5, dtype=jnp.int32)
    rows = jnp.array([-1, 5, 2, -7, 99], jnp.int32)
    out = scatter(buffer, rows, jnp.full(5, 50, jnp.int32), implementation=implementation)
    assert out[1:].tolist() == [1, 50, 3, 4]
    assert gather(buffer, rows, implementation=implementation).tolist() == [0, 0, 2, 0, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_take_reads_once(implementation):
    ways = {"scatter_with": implementation, "gather_with": implementation}
    buffer = jnp.array([0, 10, 20, 30], jnp.int32)
    rows = jnp.array([3, 1, 0], jnp.int32)
    values, buffer = take(buffer, rows, **ways)
    assert values[:2].tolist() == [30, 10]
    assert buffer[1:].tolist() == [-1, 20, -1]
    values, _ = take(buffer, rows, **ways)
    assert values[:2].tolist() == [-1, -1]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_waiting_row_survives_many_padded_launches(implementation):
    """One slot's token waits unread while other slots' launches, padded to 16 rows, scatter ten times over."""
    slots, wide = 4, 16
    rng = np.random.default_rng(0)
    step = jax.jit(lambda *a: scatter(*a, implementation=implementation))
    buffer = step(jnp.zeros(slots + 1, jnp.int32), jnp.array([1] + [0] * 15, jnp.int32), jnp.full(wide, 777, jnp.int32))
    for _ in range(10 * slots):
        slot = int(rng.integers(2, slots + 1))
        token = int(rng.integers(0, 700))
        rows = jnp.array([slot] + [0] * (wide - 1), jnp.int32)
        buffer = step(buffer, rows, jnp.array([token] * wide, jnp.int32))
        assert (int(buffer[1]), int(buffer[slot])) == (777, token)


def test_wrong_shapes_and_names_are_refused():
    buffer, rows = jnp.zeros(4, jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"values must have shape \[2\], not \[3\]"):
        scatter(buffer, rows, jnp.zeros(3, jnp.int32), implementation="xla")
    with pytest.raises(ValueError, match="values must be int32, not float32"):
        scatter(buffer, rows, jnp.zeros(2), implementation="xla")
    with pytest.raises(ValueError, match="rows must be int32"):
        gather(buffer, rows.astype(jnp.float32), implementation="xla")
    with pytest.raises(ValueError, match=r"buffer must have shape \[\?\]"):
        gather(jnp.zeros((2, 2), jnp.int32), rows, implementation="xla")
    with pytest.raises(ValueError, match="implementation must be one of"):
        gather(buffer, rows, implementation="cuda")
