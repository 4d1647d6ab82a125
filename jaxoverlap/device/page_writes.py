"""A launch's page writes: checked, and divided between its own packed array and calls that go ahead of it."""

from __future__ import annotations

import numpy as np

from jaxoverlap.core import Launch
from jaxoverlap.device.launch_checks import check_range
from jaxoverlap.device.packing import PAGE_WRITES


class PageWrites:
    """`rows` of the page table, `entries` of each, `pages` that there are. `distinct`: check that no entry is written
    twice (debug)."""

    def __init__(self, rows: int, entries: int, pages: int, distinct: bool) -> None:
        self._limits = {"slot": rows, "index": entries, "page": pages}
        self._distinct = distinct

    def split(self, launch: Launch, room: int) -> tuple[list[np.ndarray], np.ndarray]:
        """int32 [3, n] arrays of at most PAGE_WRITES for the write_pages program, and [3, up to `room`] for the step.
        Raises ValueError naming what is out of range."""
        writes = launch.page_writes
        if writes.size:
            self._check(launch)
        ahead = []
        while writes.shape[1] > room:
            ahead.append(writes[:, :PAGE_WRITES])
            writes = writes[:, PAGE_WRITES:]
        return ahead, writes

    def _check(self, launch: Launch) -> None:
        writes = launch.page_writes
        for (name, limit), values in zip(self._limits.items(), writes, strict=True):
            check_range(launch, f"page_writes: {name}", values, limit)
        if not self._distinct:
            return
        # An entry named twice with the same page is harmless; with two pages the order of a scatter would decide.
        entries, with_pages = (len(np.unique(x, axis=1).T) for x in (writes[:2], writes))
        if entries < with_pages:
            raise ValueError(f"launch {launch.number} writes an entry of the page table twice")
