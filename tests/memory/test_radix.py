"""The prefix tree against a brute-force model, which knows no tree: a set of segments, found by searching them all."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.memory.radix import RadixTree, bigram_key, token_key


@dataclass
class Segment:
    """Tokens path[start:] that came in together and go together."""

    path: tuple
    start: int
    stamp: tuple
    locks: int = 0

    def __len__(self):
        return len(self.path) - self.start


class Model:
    def __init__(self, page):
        self.page, self.segments, self.pages, self.now = page, [], {}, 0

    def cut(self, key):
        return tuple(key[: len(key) // self.page * self.page])

    def cached(self, key):
        """Tokens of the longest prefix of `key` that is cached."""
        return max(n for n in range(0, len(key) + 1, self.page) if n == 0 or key[:n] in self.pages)

    def walk(self, key):
        """Touches every segment that the key runs into, and splits one that it leaves half way."""
        self.now += 1
        n = self.cached(key)
        for s in list(self.segments):
            inside = min(n, len(s.path))
            if inside > s.start and s.path[:inside] == key[:inside]:
                s.stamp = (self.now, 0)
                if inside < len(s.path):
                    self.segments.append(Segment(s.path[:inside], s.start, s.stamp, s.locks))
                    s.start = inside
        return n

    def match(self, key):
        key = self.cut(key)
        n = self.walk(key)
        return [self.pages[key[:i]] for i in range(self.page, n + 1, self.page)], key[:n]

    def insert(self, key, pages):
        key = self.cut(key)
        n = self.walk(key)
        for i in range(n, len(key), self.page):
            self.pages[key[: i + self.page]] = pages[i // self.page]
        if len(key) > n:
            self.segments.append(Segment(key, n, (self.now, 1)))
        return n

    def lock(self, path, by):
        for s in self.segments:
            if path[: len(s.path)] == s.path:
                s.locks += by

    def evict(self, tokens):
        gone = []
        count = 0
        while count < tokens:
            leaves = [s for s in self.segments if not s.locks and not self.below(s)]
            if not leaves:
                break
            s = min(leaves, key=lambda s: s.stamp)
            self.segments.remove(s)
            gone += [self.pages.pop(s.path[:i]) for i in range(s.start + self.page, len(s.path) + 1, self.page)]
            count += len(s)
        return gone

    def below(self, segment):
        n = len(segment.path)
        return any(s.start >= n and s.path[:n] == segment.path for s in self.segments)

    def tokens(self, locked):
        return sum(len(s) for s in self.segments if (s.locks > 0) == locked)


keys = st.lists(st.integers(1, 3), max_size=12).map(tuple)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), keys),
        st.tuples(st.just("match"), keys),
        st.tuples(st.just("lock"), keys),
        st.tuples(st.just("unlock"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(0, 12)),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(st.sampled_from([1, 2, 4]), steps)
def test_any_history(page, history):
    tree, model, held, new_pages = RadixTree(page), Model(page), [], iter(range(1, 10_000))
    for kind, value in history:
        if kind == "insert":
            pages = [next(new_pages) for _ in range(len(value) // page)]
            got = tree.insert(np.array(value, np.int64), np.array(pages, np.int32))
            assert got == model.insert(value, pages)
        elif kind == "match":
            pages, _ = tree.match(np.array(value, np.int64))
            assert pages.tolist() == model.match(value)[0]
        elif kind == "lock":
            pages, node = tree.match(np.array(value, np.int64))
            want, path = model.match(value)
            assert pages.tolist() == want
            tree.lock(node)
            model.lock(path, +1)
            held.append((node, path))
        elif kind == "unlock" and held:
            node, path = held.pop(value % len(held))
            tree.unlock(node)
            model.lock(path, -1)
        elif kind == "evict":
            assert tree.evict(value).tolist() == model.evict(value)
        assert tree.evictable_tokens == model.tokens(locked=False)
        assert tree.protected_tokens == model.tokens(locked=True)
    in_tree = sorted(int(p) for node in tree.nodes() for p in node.pages)
    assert in_tree == sorted(model.pages.values())


def key(*ids):
    return np.array(ids, np.int64)


def filled(*paths):
    """A tree with these paths; the page of a token is ten times its place in the list of all tokens given."""
    tree, page = RadixTree(1), 0
    for path in paths:
        pages = np.arange(page + 1, page + 1 + len(path), dtype=np.int32)
        tree.insert(key(*path), pages)
        page += len(path)
    return tree


def test_eviction_takes_whole_leaves_and_may_take_too_much():
    tree = filled((1, 2, 3, 4, 5), (7, 8, 9))
    assert tree.evict(1).tolist() == [1, 2, 3, 4, 5]
    assert tree.evictable_tokens == 3


def test_a_parent_goes_after_its_last_child():
    tree = filled((1, 2, 3), (1, 2, 4))
    assert tree.evict(1).tolist() == [3]
    assert tree.evict(2).tolist() == [6, 1, 2]
    assert tree.evict(1).tolist() == []


def test_the_untouched_half_of_a_split_goes_before_the_newcomer():
    """As in SGLang: the new leaf is the youngest, whether or not the old half had been queued for eviction before."""
    tree = filled((1, 2, 3, 4), (9, 9), (1, 2, 7, 8))
    assert tree.evict(2).tolist() == [5, 6]
    assert tree.evict(1).tolist() == [3, 4]
    assert tree.evict(1).tolist() == [9, 10]


def test_a_touched_leaf_goes_last():
    tree = filled((1, 1), (2, 2), (3, 3))
    tree.match(key(1, 1))
    assert tree.evict(6).tolist() == [3, 4, 5, 6, 1, 2]


def test_a_lock_holds_the_way_up_and_nothing_else():
    tree = filled((1, 2), (1, 2, 3), (1, 2, 4))
    _, node = tree.match(key(1, 2, 3))
    tree.lock(node)
    assert (tree.evictable_tokens, tree.protected_tokens) == (1, 3)
    assert tree.evict(10).tolist() == [8]
    tree.unlock(node)
    assert tree.evict(10).tolist() == [5, 1, 2]


def test_unlocked_more_often_than_locked():
    tree = filled((1, 2))
    _, node = tree.match(key(1, 2))
    with pytest.raises(RuntimeError, match="unlocked more often"):
        tree.unlock(node)


def test_a_part_of_a_page_is_neither_stored_nor_found():
    tree = RadixTree(4)
    assert tree.insert(key(1, 2, 3, 4, 5, 6), np.array([1, 2], np.int32)) == 0
    assert tree.evictable_tokens == 4
    assert tree.match(key(1, 2, 3))[0].tolist() == []
    assert tree.match(key(1, 2, 3, 4, 5, 6, 7, 8))[0].tolist() == [1]


def test_keys():
    ids = np.array([5, 6, 7], np.int32)
    assert token_key(ids).tolist() == [5, 6, 7]
    assert [(int(k) >> 32, int(k) & 0xFFFFFFFF) for k in bigram_key(ids)] == [(5, 6), (6, 7)]
    assert bigram_key(ids[:1]).tolist() == []
