"""Against a float64 reference that knows nothing of pages, blocks or running softmaxes."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.kernels.kv_write import kv_write
from jaxoverlap.kernels.paged_attention import decode_attention, extend_attention
from jaxoverlap.kernels.paged_attention_pallas import choose_splits

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}


def attention_reference(q, k, v, scale):
    """One row in float64: q [n, Hq, D], the last n positions of k, v [m, Hkv, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n, heads, _ = q.shape
    m, kv_heads, _ = k.shape
    out = np.zeros_like(q)
    for i in range(n):
        for h in range(heads):
            g = h // (heads // kv_heads)
            seen = m - n + i + 1
            s = k[:seen, g] @ q[i, h] * scale
            p = np.exp(s - s.max())
            out[i, h] = (p / p.sum()) @ v[:seen, g]
    return out


@dataclass
class Paged:
    """Rows' keys and values scattered over pages; everything that no row owns is NaN."""

    keys: np.ndarray
    values: np.ndarray
    cache: tuple
    table: np.ndarray
    first_loc: int


def paged(rng, lens, page_size, kv_heads, dim, dtype, layers=2):
    pages = max(1, -(-max(lens) // page_size)) + 1
    num_pages = sum(-(-n // page_size) for n in lens) + 2
    num_locs = (num_pages + 1) * page_size
    order = iter(rng.permutation(np.arange(1, num_pages + 1)))
    table = np.zeros((len(lens), pages), np.int32)
    cache = [np.full((layers * num_locs, kv_heads, dim), np.nan, np.float32) for _ in range(2)]
    first_loc = num_locs  # the second layer
    rows = []
    for b, n in enumerate(lens):
        data = rng.standard_normal((2, n, kv_heads, dim)).astype(dtype)
        rows.append(data)
        for p in range(n):
            if p % page_size == 0:
                table[b, p // page_size] = next(order)
            loc = first_loc + table[b, p // page_size] * page_size + p % page_size
            cache[0][loc], cache[1][loc] = data[0, p], data[1, p]
    keys, values = [r[0] for r in rows], [r[1] for r in rows]
    return Paged(keys, values, tuple(jnp.asarray(c, dtype) for c in cache), table, first_loc)


def error(got, expected):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return np.abs(got - expected).max() / max(1.0, np.abs(expected).max())


IMPLEMENTATIONS = ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
# The sizes that models have, and odd ones; each also has a page size that is not a power of two or does not divide.
SHAPES = [  # page size, query heads, KV heads, head size
    (1, 3, 3, 64),
    (5, 6, 2, 80),
    (16, 8, 1, 96),
    (64, 4, 2, 128),
    (3, 2, 1, 256),
    (4, 20, 1, 20),
]


def decode(rng, lens, page_size, heads, kv_heads, dim, dtype, implementation, **sizes):
    p = paged(rng, lens, page_size, kv_heads, dim, dtype)
    q = jnp.asarray(rng.standard_normal((len(lens), heads, dim)), dtype)
    where = {"page_size": page_size, "first_loc": p.first_loc, "scale": dim**-0.5, "implementation": implementation}
    got = decode_attention(q, *p.cache, jnp.array(p.table), jnp.array(lens, jnp.int32), **where, **sizes)
    assert got.dtype == dtype
    for b, n in enumerate(lens):
        expected = attention_reference(q[b : b + 1], p.keys[b], p.values[b], dim**-0.5)[0] if n else np.zeros_like(q[b])
        assert error(got[b], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize(("page_size", "heads", "kv_heads", "dim"), SHAPES)
def test_decode(implementation, dtype, page_size, heads, kv_heads, dim):
    rng = np.random.default_rng(dim)
    decode(rng, [1, 16, 0, 37, 15, 17], page_size, heads, kv_heads, dim, dtype, implementation, kv_block=16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("lens", [[1], [33], [160, 0, 31, 32, 129]], ids=str)
def test_decode_in_parts(implementation, splits, lens):
    """Rows with fewer blocks than parts, whole blocks, one token more, and none."""
    rng = np.random.default_rng(splits)
    decode(rng, lens, 16, 4, 2, 8, jnp.float32, implementation, kv_block=32, splits=splits)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_decode_with_the_sizes_it_chooses(implementation):
    rng = np.random.default_rng(1)
    decode(rng, [700, 3], 16, 4, 2, 64, jnp.bfloat16, implementation)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "context"), [(1, 8, 32768), (1, 1, 40960), (64, 8, 4096), (4, 3, 200), (256, 8, 1)]
)
def test_parts_fill_the_device_and_no_more(rows, kv_heads, context):
    splits = choose_splits(rows * kv_heads, context)
    assert splits == 1 or splits * 128 < context  # a part is worth its program
    programs = rows * kv_heads * splits
    assert programs >= 132 or splits * 256 >= context
    assert splits == 1 or programs < 4 * 132 + 3 * rows * kv_heads


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("page_size", "dtype", "dim"),
    [
        pytest.param(1, jnp.float32, 8, marks=pytest.mark.slow),
        (16, jnp.bfloat16, 64),
        (5, jnp.float32, 80),
    ],
)
@pytest.mark.parametrize(
    "rows",  # (cached prefix, tokens of this step)
    [
        pytest.param([(0, 1)], marks=pytest.mark.slow),
        [(0, 70)],
        [(33, 7), (0, 20), (12, 1), (0, 0)],
        [(5, 1), (16, 16), (31, 1), (15, 17), (0, 0), (0, 0)],
    ],
    ids=["one token", "one prompt", "ragged", "mixed"],
)
def test_extend(implementation, dtype, page_size, dim, rows):
    heads, kv_heads, padding = 4, 2, 3
    rng = np.random.default_rng(len(rows))
    lens = [a + b for a, b in rows]
    p = paged(rng, lens, page_size, kv_heads, dim, dtype)
    extend = np.array([b for _, b in rows], np.int32)
    starts = np.cumsum(extend, dtype=np.int32) - extend
    q = jnp.asarray(rng.standard_normal((extend.sum() + padding, heads, dim)), dtype)
    where = {"page_size": page_size, "first_loc": p.first_loc, "scale": 0.3, "implementation": implementation}
    ints = [jnp.array(x, jnp.int32) for x in (p.table, lens, starts, extend)]
    got = extend_attention(q, *p.cache, *ints, **where, kv_block=16)
    assert got.dtype == dtype
    for b in range(len(rows)):
        mine = slice(starts[b], starts[b] + extend[b])
        if extend[b]:
            assert error(got[mine], attention_reference(q[mine], p.keys[b], p.values[b], 0.3)) < TOLERANCE[dtype]
    assert not np.asarray(got[extend.sum() :], np.float32).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_touch_each_other(implementation):
    """A row's result is bit-equal whatever the other rows of the batch hold."""
    rng = np.random.default_rng(3)
    p = paged(rng, [9, 200, 30], 4, 2, 8, jnp.float32)
    q = jnp.asarray(rng.standard_normal((3, 4, 8)), jnp.float32)
    where = {"page_size": 4, "first_loc": p.first_loc, "scale": 0.3, "implementation": implementation}
    whole = decode_attention(q, *p.cache, jnp.array(p.table), jnp.array([9, 200, 30], jnp.int32), **where)
    alone = decode_attention(q, *p.cache, jnp.array(p.table), jnp.array([9, 0, 0], jnp.int32), **where)
    np.testing.assert_array_equal(whole[0], alone[0])


@pytest.mark.parametrize("score", [-2e30, -np.inf])
def test_no_token_sees_the_future_whatever_its_scores(score):
    """Keys that overflowed: in XLA's form, whose masked scores stand beside the real ones."""
    keys = jnp.full((16, 1, 4), score / 4, jnp.float32)
    values = jnp.full((16, 1, 4), 1.0, jnp.float32).at[5:].set(1e9)
    q, four = jnp.ones((4, 1, 4), jnp.float32), jnp.array([4], jnp.int32)
    rows = (jnp.array([[0]], jnp.int32), four + 4, jnp.array([0], jnp.int32), four)
    out = extend_attention(q, keys, values, *rows, page_size=16, first_loc=0, scale=1.0, implementation="xla")
    assert np.abs(np.asarray(out[0])).max() <= 1.0  # position 4 of 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "dim"), [(2, 4), (3, 80), (9, 128)])
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_kv_write(implementation, heads, dim, padding):
    """Real rows land, the last one and the first real one too; padding changes page 0 alone (bug report H16)."""
    rng = np.random.default_rng(padding)
    old = rng.standard_normal((2, 10, heads, dim)).astype(np.float32)
    new = rng.standard_normal((2, 3 + padding, heads, dim)).astype(np.float32)
    locs = jnp.array([9, 3, 1, *[0] * padding], jnp.int32)
    got = kv_write(*jnp.array(old), *jnp.array(new), locs, implementation=implementation)
    for out, was, put in zip(got, old, new):
        expected = was.copy()
        expected[[9, 3, 1]] = put[:3]
        np.testing.assert_array_equal(out[1:], expected[1:])
        if not padding:
            np.testing.assert_array_equal(out[0], expected[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_kv_write_drops_what_is_outside_and_casts(implementation):
    old = jnp.full((2, 4, 1, 8), 7, jnp.bfloat16)
    new = jnp.full((2, 3, 1, 8), 1.001, jnp.float32)
    for out in kv_write(*old, *new, jnp.array([-1, 4, 2], jnp.int32), implementation=implementation):
        assert out.dtype == jnp.bfloat16
        assert out[:, 0, 0].tolist() == [7, 7, 1, 7]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("loc", [-1, 0, 3, 4])
def test_kv_write_of_one_token(implementation, loc):
    old = jnp.arange(2 * 4 * 8, dtype=jnp.bfloat16).reshape(2, 4, 1, 8)
    new = jnp.full((2, 1, 1, 8), -1.001, jnp.float32)
    for out, was in zip(kv_write(*old, *new, jnp.array([loc], jnp.int32), implementation=implementation), old):
        expected = np.array(was, np.float32)
        if 0 <= loc < 4:
            expected[loc] = -1
        np.testing.assert_array_equal(np.array(out, np.float32), expected)


def test_wrong_shapes_are_refused():
    q, kv = jnp.zeros((2, 4, 8)), jnp.zeros((16, 3, 8))
    table, lens = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    where = {"page_size": 1, "first_loc": 0, "scale": 1.0, "implementation": "xla"}
    with pytest.raises(ValueError, match="q has 4 heads, no multiple of the cache's 3"):
        decode_attention(q, kv, kv, table, lens, **where)
    with pytest.raises(ValueError, match=r"keys must have shape \[\?, \?, 8\]"):
        decode_attention(q, kv[:, :, :4], kv, table, lens, **where)
    with pytest.raises(ValueError, match=r"seq_lens must have shape \[2\]"):
        decode_attention(q, kv[:, :2], kv[:, :2], table, lens[:1], **where)
    with pytest.raises(ValueError, match="extend_lens must be int32"):
        extend_attention(q, kv[:, :2], kv[:, :2], table, lens, lens, lens.astype(jnp.float32), **where)
    with pytest.raises(ValueError, match=r"v must have shape \[2, 3, 8\]"):
        kv_write(kv, kv, jnp.zeros((2, 3, 8)), jnp.zeros((2, 2, 8)), lens, implementation="xla")
    with pytest.raises(ValueError, match="implementation must be one of pallas, xla, interpret, not 'cuda'"):
        decode_attention(q, kv, kv, table, lens, **{**where, "implementation": "cuda"})
