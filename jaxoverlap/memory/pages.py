"""The free list of KV pages: first in, first out, so that a page just freed is the last to be given out again."""

from __future__ import annotations

import numpy as np


class OutOfPages(RuntimeError):
    """More pages were asked for than are free: the scheduler's own accounting is wrong."""


class PageAllocator:
    """Pages 1 .. num_pages of `page_size` tokens each; page 0 belongs to padding rows and is never given out."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._ring = np.arange(1, num_pages + 1, dtype=np.int32)
        self._head = 0
        self.num_free = num_pages

    @property
    def available_tokens(self) -> int:
        return self.num_free * self.page_size

    def alloc(self, count: int) -> np.ndarray:
        """int32 [count]. Raises OutOfPages."""
        if count > self.num_free:
            raise OutOfPages(f"{count} pages asked for, {self.num_free} of {self.num_pages} free")
        end = self._head + count
        if end < self.num_pages:
            pages = self._ring[self._head : end].copy()
            self._head = end
        else:
            pages = np.concatenate([self._ring[self._head :], self._ring[: end - self.num_pages]])
            self._head = end - self.num_pages
        self.num_free -= count
        return pages

    def free(self, pages: np.ndarray) -> None:
        """`pages` int32 [n], each handed out before."""
        count = len(pages)
        if not count:
            return
        if self.num_free + count > self.num_pages:
            raise RuntimeError(f"{count} pages freed, but only {self.num_pages - self.num_free} are out")
        start = (self._head + self.num_free) % self.num_pages
        tail = min(count, self.num_pages - start)
        self._ring[start : start + tail] = pages[:tail]
        self._ring[: count - tail] = pages[tail:]
        self.num_free += count

    def free_pages(self) -> np.ndarray:
        """int32 [num_free], in the order in which they will be given out."""
        return self._ring.take(range(self._head, self._head + self.num_free), mode="wrap")
