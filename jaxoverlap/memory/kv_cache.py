"""KVCache: what a request's tokens occupy, over slots, pages and the prefix tree together.

The rules (what is inserted when, what is freed, when eviction starts) are SGLang's `release_kv_cache`,
`cache_unfinished_req`, `evict_from_tree_cache` and the paged allocator's estimates.
"""

from __future__ import annotations

import numpy as np

from jaxoverlap.core import Request
from jaxoverlap.memory.pages import PageAllocator
from jaxoverlap.memory.radix import Node, RadixTree, bigram_key, token_key
from jaxoverlap.memory.slots import SlotTable

NO_PAGES = np.empty(0, np.int32)


class KVCache:
    """`max_total_tokens` is a multiple of `page_size`. `bigram`: EAGLE's tree keys. `prefix_cache=False`: no reuse."""

    def __init__(self, slots: SlotTable, max_total_tokens: int, *, prefix_cache: bool, bigram: bool) -> None:
        self.slots = slots
        self.page_size = slots.page_size
        self.pages = PageAllocator(max_total_tokens // self.page_size, self.page_size)
        self.tree = RadixTree(self.page_size)
        self.prefix_cache = prefix_cache
        self.key = bigram_key if bigram else token_key

    @property
    def available_and_evictable(self) -> int:
        return self.pages.available_tokens + self.tree.evictable_tokens

    def ceil_page(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    # prefixes

    def match(self, request: Request, ids: np.ndarray) -> None:
        """Finds the longest cached prefix of `ids` and notes it on the request; takes no lock."""
        if not self.prefix_cache:
            request.prefix_pages, request.last_node = NO_PAGES, self.tree.root
        else:
            request.prefix_pages, request.last_node = self.tree.match(self.key(ids))
        request.prefix_len = request.protected_len = len(request.prefix_pages) * self.page_size

    def lock(self, node: Node | None) -> None:
        assert node is not None
        self.tree.lock(node)

    def unlock(self, node: Node | None) -> None:
        assert node is not None
        self.tree.unlock(node)

    # allocation

    def evict_for(self, tokens: int) -> None:
        """Frees cached pages when fewer than `tokens` are available: then asks for all of `tokens`, as SGLang does."""
        if self.pages.available_tokens < tokens:
            self.pages.free(self.tree.evict(tokens))

    def extend(self, requests: list[Request], stream_interval: int) -> None:
        """Slots for those without one, and pages for `extend_len` tokens behind `prefix_len` of each."""
        for r in requests:
            if r.table is None:
                self.slots.attach(r, r.params.stream_interval or stream_interval)
                self._write_row(r.slot, 0, r.prefix_pages)
        tokens = sum(r.extend_len for r in requests)
        self.evict_for(tokens if self.page_size == 1 else tokens + len(requests) * self.page_size)
        for r in requests:
            end = r.prefix_len + r.extend_len
            self._grow(r.slot, r.prefix_len, end)
            self.slots.committed_len[r.slot] = self.slots.allocated_len[r.slot] = end

    def tokens_for_decode(self, slots: np.ndarray) -> int:
        """Tokens of pages that one more token for each row takes."""
        if self.page_size == 1:
            return len(slots)
        return int(np.count_nonzero(self.slots.committed_len[slots] % self.page_size == 0)) * self.page_size

    def decode(self, slots: np.ndarray) -> None:
        """A place for one more token in each row; `slots` intp [B]."""
        self.evict_for(len(slots) * self.page_size)
        at = self.slots.committed_len[slots]
        if self.page_size == 1:
            self.slots.set_pages(slots, at, self.pages.alloc(len(slots)))
        else:
            full = np.flatnonzero(at % self.page_size == 0)
            if len(full):
                self.slots.set_pages(slots[full], at[full] // self.page_size, self.pages.alloc(len(full)))
        # without speculation a row has no place but for its committed tokens
        self.slots.committed_len[slots] = self.slots.allocated_len[slots] = at + 1

    def tokens_for_verify(self, slots: np.ndarray, reserve: int) -> int:
        """Tokens of pages still to be taken so that each row has `reserve` places behind its committed ones."""
        allocated, page = self.slots.allocated_len[slots], self.page_size
        wanted = np.maximum(self.slots.committed_len[slots] + reserve, allocated)
        return int((-(-wanted // page) - -(-allocated // page)).sum()) * page

    def verify(self, slots: np.ndarray, reserve: int) -> None:
        """Reserves places for a verify step: SGLang's committed + 2 x drafts, the factor for the result in flight."""
        need = self.tokens_for_verify(slots, reserve)
        self.evict_for(need if self.page_size == 1 else need + len(slots) * self.page_size)
        for slot in slots:
            start = int(self.slots.allocated_len[slot])
            end = max(start, int(self.slots.committed_len[slot]) + reserve)
            self._grow(slot, start, end)
            self.slots.allocated_len[slot] = end
        self.slots.committed_len[slots] = self.slots.committed_len[slots] + 1

    # the ways back

    def cache_unfinished(self, request: Request) -> None:
        """Puts a running request's prefilled tokens into the tree, where others find them, and its lock with them."""
        slot, fill = request.slot, request.prefix_len + request.extend_len
        row = self._row(slot, fill)
        if not self.prefix_cache:
            request.prefix_pages = row
            return
        key = self.key(self.slots.tokens[slot, :fill])
        self._insert(request, key, row)
        pages, node = self.tree.match(key)
        first = request.protected_len // self.page_size
        changed = first + np.flatnonzero(pages[first:] != row[first : len(pages)])
        if len(changed):
            self.slots.set_pages(np.full(len(changed), slot), changed, pages[changed])
        request.protected_len = len(pages) * self.page_size
        self.unlock(request.last_node)
        self.lock(node)
        request.last_node = node
        request.prefix_pages = np.concatenate([pages, row[len(pages) :]])

    def release(self, request: Request, *, insert: bool) -> None:
        """Gives back the slot and all pages; with `insert`, the tree keeps those of whole committed pages."""
        slot = request.slot
        known = int(self.slots.prompt_len[slot] + self.slots.output_len[slot])
        committed = min(int(self.slots.committed_len[slot]), known)
        row = self._row(slot, int(self.slots.allocated_len[slot]))
        if not self.prefix_cache:
            self.pages.free(row)
        else:
            key = self.key(self.slots.tokens[slot, :committed])
            whole = len(key) // self.page_size
            first = request.protected_len // self.page_size
            if insert:
                self._insert(request, key, row)
            else:
                self.pages.free(row[first:whole])
            self.pages.free(row[whole:] if whole >= first else row[first:])
            self.unlock(request.last_node)
        request.last_node, request.protected_len = None, 0
        request.prefix_pages = NO_PAGES
        self.slots.detach(request)

    def flush(self) -> None:
        """Empties the prefix tree. Raises RuntimeError while a request holds a part of it."""
        if self.tree.protected_tokens:
            raise RuntimeError(f"{self.tree.protected_tokens} cached tokens are in use")
        self.pages.free(self.tree.evict(self.tree.evictable_tokens))
        self.tree.reset()

    def _insert(self, request: Request, key: np.ndarray, row: np.ndarray) -> None:
        had = self.tree.insert(key, row)
        self.pages.free(row[request.protected_len // self.page_size : had // self.page_size])

    def _row(self, slot: int, tokens: int) -> np.ndarray:
        return self.slots.page_table[slot, : -(-tokens // self.page_size)].copy()

    def _grow(self, slot: int, start: int, end: int) -> None:
        first, last = -(-start // self.page_size), -(-end // self.page_size)
        if last > first:
            self._write_row(slot, first, self.pages.alloc(last - first))

    def _write_row(self, slot: int, first: int, pages: np.ndarray) -> None:
        if len(pages):
            self.slots.set_pages(np.full(len(pages), slot), np.arange(first, first + len(pages)), pages)
