"""KVCache: who holds which page, with a plain list of cells as the device's memory to read tokens back from."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.core import Request
from jaxoverlap.memory.kv_cache import KVCache
from jaxoverlap.memory.slots import SlotTable
from jaxoverlap.sampling_params import SamplingParams

PAGES = [1, 4, 16]


class World:
    """A cache, and the memory its pages stand for: what a request wrote must be what it reads."""

    def __init__(self, page, pool_pages=24, slots=4, prefix_cache=True, bigram=False):
        self.page, self.total = page, pool_pages * page
        self.table = SlotTable(slots, 512, page)
        self.kv = KVCache(self.table, self.total, prefix_cache=prefix_cache, bigram=bigram)
        self.cells = np.full((pool_pages + 1) * page, -1)
        self.live = []

    def ids(self, r):
        return [*r.prompt_ids.tolist(), *r.output_ids.tolist()]

    def cell(self, r, position):
        page = int(self.table.page_table[r.slot, position // self.page])
        assert page > 0
        return page * self.page + position % self.page

    def admit(self, prompt, chunk=None):
        """Prefills the prompt, or its first `chunk` tokens behind what is cached."""
        r = Request("r", np.array(prompt, np.int32), SamplingParams(max_new_tokens=64))
        self.kv.match(r, r.prompt_ids[:-1])
        self.kv.lock(r.last_node)
        self.live.append(r)
        self.step(r, chunk)
        return r

    def step(self, r, chunk=None):
        left = r.prompt_len - r.prefix_len
        r.extend_len = left if chunk is None else min(chunk, left)
        self.kv.extend([r], 1)
        for i in range(r.prefix_len, r.prefix_len + r.extend_len):
            self.cells[self.cell(r, i)] = r.prompt_ids[i]

    def cache(self, r):
        self.kv.cache_unfinished(r)
        r.prefix_len += r.extend_len
        r.extend_len = 0

    def decode(self, r, token):
        """The token sampled last is appended; then a step writes it."""
        slot = np.array([r.slot])
        self.table.append(slot, np.array([token], np.int32), None)
        self.kv.decode(slot)
        self.cells[self.cell(r, len(self.ids(r)) - 1)] = token

    def release(self, r, insert=True):
        self.kv.release(r, insert=insert)
        self.live.remove(r)

    def written(self, r):
        return int(self.table.committed_len[r.slot])

    def check(self):
        owned = Counter(self.kv.pages.free_pages().tolist())
        owned.update(int(p) for node in self.kv.tree.nodes() for p in node.pages)
        for r in self.live:
            assert [self.cells[self.cell(r, i)] for i in range(self.written(r))] == self.ids(r)[: self.written(r)]
            last = -(-int(self.table.allocated_len[r.slot]) // self.page)
            owned.update(self.table.page_table[r.slot, r.protected_len // self.page : last].tolist())
        assert owned == Counter(range(1, self.total // self.page + 1))

    @property
    def free(self):
        return self.kv.pages.available_tokens

    @property
    def cached(self):
        return self.kv.tree.evictable_tokens

    @property
    def locked(self):
        return self.kv.tree.protected_tokens


def up(n, page):
    return (n + page - 1) // page * page


def down(n, page):
    return n - n % page


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 16, 17, 30])
def test_a_prompt_takes_whole_pages_and_leaves_whole_pages(page, n):
    w = World(page, pool_pages=64)
    r = w.admit(range(100, 100 + n))
    assert w.free == w.total - up(n, page)
    w.cache(r)
    w.check()
    assert (w.cached, w.locked) == (0, down(n, page))
    for token in (7, 8, 9):
        w.decode(r, token)
        w.check()
    assert w.free == w.total - up(n + 3, page)
    w.release(r)
    w.check()
    assert (w.free, w.cached, w.locked) == (w.total - down(n + 3, page), down(n + 3, page), 0)


@pytest.mark.parametrize(("page", "want"), [(1, [1] * 9), (4, [0, 0, 4, 0, 0, 0, 4, 0, 0]), (16, [0] * 9)])
def test_tokens_for_decode_from_6_tokens_on(page, want):
    w = World(page)
    r = w.admit(range(6))
    got = []
    for token in range(9):
        before, asked = w.free, w.kv.tokens_for_decode(np.array([r.slot]))
        w.decode(r, token)
        assert before - w.free == asked
        got.append(asked)
    assert got == want


@pytest.mark.parametrize("page", PAGES)
def test_the_last_token_of_a_prompt_is_never_taken_from_the_cache(page):
    w = World(page, pool_pages=64)
    prompt = list(range(32))
    w.release(w.admit(prompt))
    again = w.admit(prompt)
    assert again.prefix_len == down(31, page)
    w.check()


@pytest.mark.parametrize("page", PAGES)
def test_two_that_prefill_the_same_prompt_share_it_afterwards(page):
    w = World(page, pool_pages=64)
    prompt = list(range(20))
    a, b = w.admit(prompt), w.admit(prompt)
    assert w.free == w.total - 2 * up(20, page)
    w.cache(a)
    w.check()
    w.cache(b)
    w.check()
    shared = down(20, page) // page
    assert w.free == w.total - 2 * up(20, page) + shared * page
    rows = w.table.page_table[[a.slot, b.slot], :shared]
    assert np.array_equal(rows[0], rows[1])
    w.release(a)
    w.check()
    assert w.locked == down(20, page)
    w.release(b)
    w.check()
    assert (w.locked, w.cached) == (0, down(20, page))


def test_the_device_hears_of_pages_that_moved():
    w = World(1)
    a, b = w.admit([1, 2, 3]), w.admit([1, 2, 4])
    w.cache(a)
    w.table.take_page_writes()
    w.cache(b)
    writes = w.table.take_page_writes().T.tolist()
    assert writes == [[b.slot, i, int(w.table.page_table[a.slot, i])] for i in (0, 1)]


@pytest.mark.parametrize("page", PAGES)
def test_release_without_insert_gives_all_but_the_shared_part_back(page):
    w = World(page, pool_pages=64)
    w.release(w.admit(range(40)))
    kept = w.cached
    r = w.admit([*range(40), 900, 901, 902])
    assert r.prefix_len == kept
    w.decode(r, 5)
    w.release(r, insert=False)
    w.check()
    assert (w.cached, w.locked, w.free) == (kept, 0, w.total - kept)
    assert r.output_ids.tolist() == [5]


@pytest.mark.parametrize("page", PAGES)
def test_a_release_caches_what_was_committed(page):
    """A row that has been given a place for a token that nobody knows yet keeps it out of the tree."""
    w = World(page, pool_pages=64)
    r = w.admit(range(16))
    w.table.append(np.array([r.slot]), np.array([7], np.int32), None)
    w.kv.decode(np.array([r.slot]))
    w.kv.decode(np.array([r.slot]))
    w.release(r)
    w.check()
    assert w.cached == down(17, page)


@pytest.mark.parametrize("page", PAGES)
def test_chunks_enter_the_tree_one_by_one(page):
    w = World(page, pool_pages=64)
    r = w.admit(range(40), chunk=16)
    for done in (16, 32):
        w.cache(r)
        w.check()
        assert (r.prefix_len, w.locked) == (done, down(done, page))
        w.step(r, chunk=16)
        w.check()
    w.cache(r)
    assert (r.prefix_len, w.locked) == (40, down(40, page))
    w.release(r)
    w.check()


def test_eviction_is_asked_for_the_whole_need_not_for_what_is_missing():
    w = World(1, pool_pages=20)
    for first in (100, 200, 300):
        w.release(w.admit(range(first, first + 5)))
    assert (w.free, w.cached) == (5, 15)
    w.kv.evict_for(5)
    assert (w.free, w.cached) == (5, 15)
    w.kv.evict_for(6)  # one is missing; 6 are asked for, so two leaves of 5 go
    assert (w.free, w.cached) == (15, 5)
    assert w.admit([*range(300, 305), 1]).prefix_len == 5


def test_what_is_locked_is_not_evicted():
    w = World(1, pool_pages=20)
    r = w.admit(range(10))
    w.cache(r)
    w.release(w.admit(range(100, 105)))
    w.kv.evict_for(20)
    w.check()
    assert (w.free, w.cached, w.locked) == (10, 0, 10)


def test_bigram_keys_keep_one_token_less():
    w = World(1, bigram=True)
    r = w.admit([1, 2, 3, 4, 5])
    w.cache(r)
    w.check()
    assert (w.locked, r.protected_len, len(r.prefix_pages)) == (4, 4, 5)
    w.decode(r, 6)
    w.release(r)
    w.check()
    assert w.cached == 5
    assert w.admit([1, 2, 3, 9, 9]).prefix_len == 2  # the pairs 1-2 and 2-3
    w.check()


@pytest.mark.parametrize("page", [4, 16])
def test_bigram_keys_are_cut_at_pages_too(page):
    w = World(page, pool_pages=64, bigram=True)
    for n in (page, page + 1, 2 * page):
        w.release(w.admit(range(n * 100, n * 100 + n)))
    w.check()
    assert w.cached == sum(down(n - 1, page) for n in (page, page + 1, 2 * page))


@pytest.mark.parametrize("page", PAGES)
def test_without_a_prefix_cache_nothing_is_kept(page):
    w = World(page, pool_pages=64, prefix_cache=False)
    for _ in range(2):
        r = w.admit(range(20))
        assert r.prefix_len == 0
        w.cache(r)
        w.decode(r, 5)
        w.check()
        w.release(r)
        w.check()
        assert (w.free, w.cached, w.locked) == (w.total, 0, 0)


def test_flush():
    w = World(4)
    r = w.admit(range(9))
    w.cache(r)
    with pytest.raises(RuntimeError, match="8 cached tokens are in use"):
        w.kv.flush()
    w.release(r)
    w.kv.flush()
    assert (w.free, w.cached) == (w.total, 0)
    assert w.admit(range(9)).prefix_len == 0
    w.check()


@pytest.mark.parametrize("page", PAGES)
def test_verify_reserves_places_behind_the_committed_ones(page):
    """6 places for 3 drafts, from a prompt of 6; runs of 5 and 4 make it 11 and 15 tokens."""
    want = [up(end, page) - up(start, page) for start, end in ((6, 12), (12, 17), (17, 21))]
    w = World(page, bigram=True)
    r = w.admit(range(6))
    slot = np.array([r.slot])
    got = []
    for accepted in (5, 4, 3):
        before, need = w.free, w.kv.tokens_for_verify(slot, 6)
        w.kv.verify(slot, 6)
        assert before - w.free == need
        got.append(need)
        for token in range(accepted):
            w.table.append(slot, np.array([token], np.int32), None)
        w.table.committed_len[slot] += accepted - 1
    assert got == want


OPS = st.lists(st.tuples(st.sampled_from("aaaccddddrx"), st.integers(0, 3), st.integers(1, 9)), max_size=50)


@settings(max_examples=150)
@given(st.sampled_from([1, 2, 4, 16]), st.booleans(), st.booleans(), OPS)
def test_any_history(page, prefix_cache, bigram, history):
    """Prompts over three ids, so that they share; every step reads back what each request wrote."""
    w = World(page, pool_pages=max(24, 96 // page), prefix_cache=prefix_cache, bigram=bigram)
    for kind, which, n in history:
        room = w.kv.available_and_evictable
        if kind == "a" and len(w.live) < 4 and room > n + 3 * page:
            rng = np.random.default_rng(n * 4 + which)
            w.admit(rng.integers(1, 3, n + which).tolist(), chunk=None if which % 2 else up(n, page))
        elif w.live:
            r = w.live[which % len(w.live)]
            in_prompt = r.prefix_len + r.extend_len < r.prompt_len
            if kind == "c" and r.extend_len:
                w.cache(r)
                if in_prompt and room > n + 2 * page:
                    w.step(r, chunk=up(n, page))
            elif kind == "d" and not in_prompt and not r.extend_len and room > 2 * page:
                w.decode(r, n)
            elif kind in "rx":
                w.release(r, insert=kind == "r")
        w.check()
    for r in list(w.live):
        w.release(r)
    w.check()
    assert w.locked == 0
    assert w.free + w.cached == w.total
