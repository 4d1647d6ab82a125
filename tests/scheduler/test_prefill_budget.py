"""Who is admitted to a prefill, at the edges of every budget. The expected edges are SGLang's formulas, written out."""

import pytest
from harness import Harness


def admitted(h):
    """Rows of the launches of one turn: {rid: tokens to prefill}."""
    launches = [x for x in h.turn() if hasattr(x, "mode")]
    assert len(launches) <= 1
    if not launches or not launches[0].mode.is_extend:
        return {}
    x = launches[0]
    return {r.rid: int(n) for r, n in zip(x.requests, x.extend_lens)}


def harness(pool, **settings):
    settings = {"chunked_prefill_size": -1, "max_running_requests": 8, **settings}
    return Harness(context_length=4096, max_total_tokens=pool, **settings)


def prompt(n, first=100):
    return list(range(first, first + n))


def up(n, page):
    return -(-n // page) * page


# what the pool has promised: a request takes its prompt, its output cap and a page


@pytest.mark.parametrize(("spare", "want"), [(0, ["a"]), (1, ["a", "b"])])
def test_a_request_that_needs_exactly_what_is_left_waits(spare, want):
    h = harness(pool=(10 + 6 + 1) + (7 + 5 + 1) + spare)
    h.submit("a", prompt(10), 6)
    h.submit("b", prompt(7, 500), 5)
    assert list(admitted(h)) == want
    assert h.scheduler.running_batch.is_full == (want == ["a"])


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("spare", [-1, 0, 1, 4, 16])
def test_an_admitted_prompt_is_charged_in_whole_pages_and_a_coming_one_in_tokens(page, spare):
    charged, asked = up(10, page) + 6 + page, 7 + 5 + page
    pool = up(charged + asked + spare, page)
    h = harness(pool=pool, page_size=page)
    h.submit("a", prompt(10), 6)
    h.submit("b", prompt(7, 500), 5)
    assert list(admitted(h)) == (["a", "b"] if asked < pool - charged else ["a"])


@pytest.mark.parametrize(("spare", "want"), [(0, {"a": 5}), (1, {"a": 5, "b": 10})])
def test_what_a_request_locks_is_no_longer_available(spare, want):
    """20 cached tokens count as available until b, which builds on them, locks them: 10 + 5 + 1 against the rest."""
    h = harness(pool=20 + (5 + 3 + 1) + (10 + 5 + 1) + spare, disable_overlap_schedule=True)
    h.submit("before", prompt(20), 1)  # ends with its first token, and leaves its prompt in the tree
    h.run()
    assert h.scheduler.kv.tree.evictable_tokens == 20
    h.submit("a", prompt(5, 900), 3)
    h.submit("b", [*prompt(20), *prompt(10, 700)], 5)
    assert admitted(h) == want


@pytest.mark.parametrize(("ratio", "cap", "clip"), [(0.5, 41, 4096), (1.0, 31, 4096), (0.25, 81, 40)])
@pytest.mark.parametrize("spare", [0, 1])
def test_a_running_request_keeps_a_share_of_its_cap(ratio, cap, clip, spare):
    """One runs with one output out; it keeps min(cap - 1, clip) x ratio, and holds its 10 prompt tokens."""
    reserved, asked = min(cap - 1, clip) * ratio, 80 + 5 + 1
    pool = int(10 + reserved + asked + spare)
    h = harness(pool, init_new_token_ratio=ratio, clip_max_new_tokens=clip, disable_overlap_schedule=True)
    first = h.submit("a", prompt(10), cap)
    assert admitted(h) == {"a": 10}
    assert (first.max_new_tokens, first.output_len) == (cap, 1)
    h.submit("b", prompt(80, 500), 5)
    assert list(admitted(h)) == (["b"] if spare else [])


@pytest.mark.parametrize(("clip", "want"), [(4096, {"a": 10}), (5, {"a": 10, "b": 10})])
def test_a_long_cap_counts_only_up_to_the_clip(clip, want):
    h = harness(pool=100, clip_max_new_tokens=clip)
    h.submit("a", prompt(10), 60)
    h.submit("b", prompt(10, 500), 60)
    assert admitted(h) == want


def test_conservativeness_scales_the_share():
    h = harness(pool=100, init_new_token_ratio=0.4, schedule_conservativeness=2.0)
    assert h.scheduler.new_token_ratio.value == 0.8
    h = harness(pool=100, init_new_token_ratio=0.7, schedule_conservativeness=2.0)
    assert h.scheduler.new_token_ratio.value == 1.0


# what one batch may hold


@pytest.mark.parametrize(
    ("budget", "want"),
    [(16, ["a"]), (17, ["a", "b"]), (18, ["a", "b"]), (26, ["a", "b"]), (27, ["a", "b", "c"])],
)
def test_max_prefill_tokens_refuses_what_fills_it_exactly(budget, want):
    """10 + 6 + 10: b goes in where 6 < budget - 10, c where 10 < budget - 16."""
    h = harness(pool=1000, max_prefill_tokens=budget)
    for rid, n, first in [("a", 10, 100), ("b", 6, 300), ("c", 10, 500)]:
        h.submit(rid, prompt(n, first), 4)
    assert list(admitted(h)) == want
    assert not h.scheduler.running_batch.is_full


def test_the_first_of_a_batch_may_exceed_max_prefill_tokens():
    h = harness(pool=1000, max_prefill_tokens=8)
    h.submit("a", prompt(20), 4)
    h.submit("b", prompt(3, 500), 4)
    assert admitted(h) == {"a": 20}
    assert admitted(h) == {"b": 3}


@pytest.mark.parametrize("page", [1, 4])
def test_chunks_share_one_budget(page):
    """16 a step: 10 tokens cost 10 or, in pages of 4, 12; the next prompt gets the rest, and goes on first."""
    left = 16 - up(10, page)
    h = harness(pool=400, page_size=page, chunked_prefill_size=16, disable_overlap_schedule=True)
    h.submit("a", prompt(10), 1)
    h.submit("b", prompt(30, 300), 1)
    h.submit("c", prompt(2, 500), 1)
    assert admitted(h) == {"a": 10, "b": left}
    assert admitted(h) == {"b": 16}
    rest = 30 - left - 16
    assert admitted(h) == {"b": rest, "c": 2}


def test_a_chunk_that_fits_exactly_ends_the_prompt():
    h = harness(pool=400, chunked_prefill_size=16, disable_overlap_schedule=True)
    h.submit("a", prompt(32), 1)
    assert admitted(h) == {"a": 16}
    assert h.scheduler.chunked is h.requests["a"]
    assert admitted(h) == {"a": 16}
    assert h.scheduler.chunked is None
    assert h.requests["a"].finished


def test_a_mixed_batch_pays_for_its_decode_rows():
    """16 a step less the two that run."""
    h = harness(pool=400, chunked_prefill_size=16, enable_mixed_chunk=True, disable_overlap_schedule=True)
    h.submit("a", prompt(4), 20)
    h.submit("b", prompt(4, 300), 20)
    assert admitted(h) == {"a": 4, "b": 4}
    h.submit("c", prompt(40, 500), 4)
    assert admitted(h) == {"c": 14, "a": 1, "b": 1}


# ends of a batch by slots


def test_no_more_than_max_running_requests():
    h = harness(pool=1000, max_running_requests=3, disable_overlap_schedule=True)
    for i in range(5):
        h.submit(f"r{i}", prompt(4, 100 * i + 1), 3)
    assert list(admitted(h)) == ["r0", "r1", "r2"]
    assert h.scheduler.running_batch.is_full
    assert admitted(h) == {}


# ignore_eos without a prefix cache: the lengths are known, so the future is simulated


def two_fit(pool, e1, m1, e2, m2):
    """Whether two known lengths are admitted together. For each end in the order of the list, the longer or newer
    first: what is free, with what earlier ends gave back, must exceed one token a row beyond the tokens to come."""
    if pool - e1 - m1 <= 2 or e2 > pool - (e1 + m1 + 1) or pool - (e1 + m1 + 1) <= 0:
        return False
    free = pool - e1 - e2
    return free - 2 * m2 > 2 and free + e2 - m1 > 1


@pytest.mark.parametrize(("e1", "m1", "e2", "m2"), [(10, 5, 10, 5), (8, 20, 6, 3), (6, 3, 8, 20), (20, 2, 5, 12)])
def test_known_lengths_are_simulated_to_their_end(e1, m1, e2, m2):
    edges = set()
    for pool in range(max(e1 + m1, e2 + m2) + 2, e1 + e2 + 2 * (m1 + m2) + 20):
        h = harness(pool, disable_radix_cache=True, disable_overlap_schedule=True)
        a = h.submit("a", prompt(e1), m1, ignore_eos=True)
        b = h.submit("b", prompt(e2, 500), m2, ignore_eos=True)
        want = two_fit(pool, e1, m1, e2, m2)
        assert list(admitted(h)) == (["a", "b"] if want else ["a"]), pool
        assert (a.max_new_tokens, b.max_new_tokens) == (m1, m2)
        edges.add(want)
    assert edges == {False, True}


def test_with_a_prefix_cache_known_lengths_are_estimated_like_others():
    pool = (10 + 6 + 1) + (7 + 5 + 1)
    for spare, want in [(0, ["a"]), (1, ["a", "b"])]:
        h = harness(pool + spare)
        h.submit("a", prompt(10), 6, ignore_eos=True)
        h.submit("b", prompt(7, 500), 5, ignore_eos=True)
        assert list(admitted(h)) == want


# what a cap is cut to, so that a request alone always fits


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("asked", [5, 1000, None])
def test_the_cap_is_cut_to_what_the_pool_holds(page, asked):
    h = harness(pool=64, page_size=page, disable_overlap_schedule=True)
    request = h.submit("a", prompt(10), asked)
    h.run()
    most = min(63 - 10 - 1, 64 - up(10, page) - page - 1)
    assert request.max_new_tokens == (most if asked is None else min(asked, most))
    assert request.finished
