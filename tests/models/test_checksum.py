import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.models.checksum import ChecksumConfig, ChecksumModel
from jaxoverlap.models.paged import PagedContext


def test_oracle_by_hand():
    config = ChecksumConfig()
    # h = 7*31 + (5+1)*1 = 223; then 223*31 + (6+1)*2 = 6927; 10 + 6927 % 900 = 637
    assert config.next_token([5, 6]) == 637
    # i = 13 starts the period again
    h = 7
    for i in range(14):
        h = (h * 31 + 1 * (i % 13 + 1)) % 1_000_003
    assert config.next_token([0] * 14) == 10 + h % 900


def test_oracle_ends():
    config = ChecksumConfig()
    free = config.oracle([1, 2, 3], 8)
    assert len(free) == 8
    assert config.oracle([1, 2, 3], 8, eos=free[3]) == free[:4]
    assert config.oracle([1, 2, 3], 3, allow=lambda out: [free[0], 5] if not out else [900, 901]) == [
        free[0],
        *config.oracle([1, 2, 3, free[0]], 2, allow=lambda _: [900, 901]),
    ]
    assert config.oracle([1], 0) == []


def test_configs_that_cannot_be_exact_are_refused():
    with pytest.raises(ValueError, match="past the vocabulary of 1000"):
        ChecksumConfig(offset=200)
    with pytest.raises(ValueError, match="overflows int32"):
        ChecksumConfig(modulus=100_000_007)


@pytest.mark.parametrize("page_size", [1, 4])
def test_reads_the_cache_through_the_page_table(page_size):
    """Rows with cached prefixes, one of them empty, against the oracle; another token in a page changes the answer."""
    config = ChecksumConfig(vocab_size=500, span=400, offset=50, modulus=65_521)
    model = ChecksumModel(config)
    rng = np.random.default_rng(page_size)
    lens, extend = np.array([37, 5, 0, 16], np.int32), np.array([4, 5, 0, 1], np.int32)
    contexts = [rng.integers(0, 500, n) for n in lens]
    pages = 48 // page_size
    order = iter(rng.permutation(np.arange(1, 4 * pages)))
    table = np.zeros((4, pages), np.int32)
    num_locs = 4 * pages * page_size
    cache = np.full(num_locs, 499, np.int32)
    ids, locs, rows = [], [], []
    for b, context in enumerate(contexts):
        for p, token in enumerate(context):
            if p % page_size == 0:
                table[b, p // page_size] = next(order)
            loc = table[b, p // page_size] * page_size + p % page_size
            if p < lens[b] - extend[b]:
                cache[loc] = token
            else:
                ids, locs, rows = [*ids, token], [*locs, loc], [*rows, b]
    ids, locs, rows = [*ids, 7], [*locs, 0], [*rows, 3]  # padding
    starts = np.cumsum(extend) - extend

    def run(cache):
        arrays = (np.zeros(len(ids)), rows, locs, table, lens, starts, extend, np.maximum(starts + extend - 1, 0))
        context = PagedContext(
            *(jnp.array(a, jnp.int32) for a in arrays), page_size, num_locs, False, Kernels.choose("auto", "cpu")
        )
        hidden, (stored,) = model(jnp.array(ids, jnp.int32), context, (jnp.array(cache),))
        return np.asarray(model.logits(hidden[context.last_tokens])), np.asarray(stored)

    logits, stored = run(cache)
    assert logits.dtype == np.float32
    for b in (0, 1, 3):
        assert logits[b].argmax() == config.next_token(contexts[b])
        assert logits[b].max() == 0
    expected = cache.copy()
    expected[locs[:-1]] = ids[:-1]
    np.testing.assert_array_equal(stored[1:], expected[1:])
    cache[table[0, 0] * page_size] += 1
    changed, _ = run(cache)
    assert changed[0].argmax() != logits[0].argmax()
    assert changed[3].argmax() == logits[3].argmax()
