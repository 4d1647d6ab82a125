import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.buckets import Buckets, decode_rows, extend_tokens, largest_extend


def make(context=256, total=4096, **config):
    return Buckets.of(EngineConfig(**config), context_length=context, max_total_tokens=total)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (16, (1, 2, 4, 8, 16)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_decode_rows(most, expected):
    assert decode_rows(most) == expected


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, (1,)), (16, (16,)), (20, (5, 20)), (32, (8, 32)), (512, (8, 32, 128, 512)), (1000, (16, 63, 250, 1000))],
)
def test_extend_tokens(largest, expected):
    assert extend_tokens(largest) == expected


@pytest.mark.parametrize(("budget", "page_size"), [(16, 1), (20, 1), (32, 4), (33, 1)])
def test_every_launch_has_a_bucket_and_none_is_above_the_budget(budget, page_size):
    buckets = make(chunked_prefill_size=budget - budget % page_size, page_size=page_size, max_running_requests=6)
    budget -= budget % page_size
    assert max(b.tokens for b in buckets.extend) == budget
    for tokens in range(1, budget + 1):
        for rows in range(1, min(6, tokens) + 1):
            bucket = buckets.for_extend(tokens, rows)
            assert tokens <= bucket.tokens <= budget
            assert rows <= bucket.rows <= 6
            assert bucket.writes >= -(-tokens // page_size)
    for rows in range(7):
        assert rows <= buckets.for_decode(rows).rows <= 6
    with pytest.raises(ValueError, match=f"a prefill launch of {budget + 1} tokens is above the largest, {budget}"):
        buckets.for_extend(budget + 1, 1)
    with pytest.raises(ValueError, match="a decode launch of 7 rows is above max_running_requests 6"):
        buckets.for_decode(7)


def test_largest_extend():
    def largest(context=256, total=4096, **config):
        return largest_extend(EngineConfig(**config), context_length=context, max_total_tokens=total)

    assert largest(chunked_prefill_size=100, max_prefill_tokens=16) == 100
    assert largest(chunked_prefill_size=-1, max_prefill_tokens=300) == 300
    assert largest(chunked_prefill_size=-1, max_prefill_tokens=20) == 256  # one whole prompt
    assert largest(chunked_prefill_size=-1, total=200) == 200
    assert largest(max_running_requests=1, context=64) == 64
