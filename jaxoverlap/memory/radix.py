"""The prefix tree (SGLang's RadixCache): which pages hold the KV of which token sequence.

Keys are int64 arrays, one entry a token (or a packed pair of tokens: see `bigram_key`), cut at page boundaries.
Locks count the requests that need a node; a locked node's ancestors are locked too. Eviction takes whole leaves, least
recently touched first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np


class Node:
    __slots__ = ("children", "in_heap", "key", "last_access", "lock_ref", "pages", "parent")

    def __init__(self, key: np.ndarray, pages: np.ndarray, parent: Node | None, last_access: int) -> None:
        self.key = key  # int64 [n], n a multiple of the page size
        self.pages = pages  # int32 [n / page size]
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.last_access = last_access
        self.in_heap = False

    def __lt__(self, other: Node) -> bool:
        return self.last_access < other.last_access

    @property
    def is_evictable(self) -> bool:
        return self.lock_ref == 0 and not self.children and self.parent is not None


def token_key(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.int64)


def bigram_key(ids: np.ndarray) -> np.ndarray:
    """EAGLE's keys: n ids make n - 1 pairs, each packed into one int64."""
    wide = ids.astype(np.int64)
    return (wide[:-1] << 32) | wide[1:]


class RadixTree:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the caller frees the pages."""
        self._clock = 0
        self.root = Node(np.empty(0, np.int64), np.empty(0, np.int32), None, 0)
        self.root.lock_ref = 1
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self._heap: list[tuple[int, Node]] = []

    def match(self, key: np.ndarray) -> tuple[np.ndarray, Node]:
        """Longest cached prefix of `key`: (pages int32 [matched / page size], its last node). Touches the path, and
        splits a node that matches in part."""
        key = self._aligned(key)
        node, found = self.root, []
        now = self._tick()
        node.last_access = now
        while len(key):
            child = node.children.get(self._first(key))
            if child is None:
                break
            child.last_access = now
            n = self._common(child.key, key)
            if n < len(child.key):
                node = self._split(child, n)
                found.append(node.pages)
                break
            found.append(child.pages)
            node = child
            key = key[n:]
        return (np.concatenate(found) if found else np.empty(0, np.int32)), node

    def insert(self, key: np.ndarray, pages: np.ndarray) -> int:
        """Adds `pages` under `key`. Returns how many leading tokens the tree had already: for those it keeps its own
        pages, and the caller frees its duplicates."""
        key = self._aligned(key)
        node, had = self.root, 0
        now = self._tick()
        node.last_access = now
        while len(key):
            first = self._first(key)
            child = node.children.get(first)
            if child is None:
                new = pages[had // self.page_size :][: len(key) // self.page_size]
                leaf = Node(key.copy(), new.copy(), node, self._tick())  # newer than what was split off beside it
                node.children[first] = leaf
                self.evictable_tokens += len(key)
                self._offer(leaf)
                break
            child.last_access = now
            n = self._common(child.key, key)
            had += n
            key = key[n:]
            node = self._split(child, n) if n < len(child.key) else child
        return had

    def lock(self, node: Node) -> None:
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_tokens -= len(node.key)
                self.protected_tokens += len(node.key)
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            if node.lock_ref < 1:
                raise RuntimeError("a prefix tree node was unlocked more often than locked")
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_tokens += len(node.key)
                self.protected_tokens -= len(node.key)
                self._offer(node)
            node = node.parent

    def evict(self, tokens: int) -> np.ndarray:
        """Removes whole unlocked leaves until at least `tokens` are gone or none is left; returns their pages."""
        gone: list[np.ndarray] = []
        count = 0
        while count < tokens and self._heap:
            stamp, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not node.is_evictable:
                continue
            if stamp != node.last_access:
                self._offer(node)
                continue
            gone.append(node.pages)
            count += len(node.key)
            self._remove(node)
        return np.concatenate(gone) if gone else np.empty(0, np.int32)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first(leaf.key)]
        leaf.parent = None
        self.evictable_tokens -= len(leaf.key)
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        if node.is_evictable and not node.in_heap:
            node.in_heap = True
            heapq.heappush(self._heap, (node.last_access, node))

    def _split(self, child: Node, n: int) -> Node:
        parent = child.parent
        assert parent is not None
        pages = n // self.page_size
        front = Node(child.key[:n], child.pages[:pages], parent, child.last_access)
        front.lock_ref = child.lock_ref
        parent.children[self._first(front.key)] = front
        child.key, child.pages, child.parent = child.key[n:], child.pages[pages:], front
        front.children[self._first(child.key)] = child
        return front

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _aligned(self, key: np.ndarray) -> np.ndarray:
        return key[: len(key) // self.page_size * self.page_size]

    def _first(self, key: np.ndarray) -> bytes:
        return key[: self.page_size].tobytes()

    def _common(self, a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        differs = a[:n] != b[:n]
        first = int(differs.argmax()) if n else 0
        if n and not differs[first]:
            first = n
        return first // self.page_size * self.page_size
