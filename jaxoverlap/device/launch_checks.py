"""What a runner refuses of a launch, and what the poisoned FutureMap found."""

from __future__ import annotations

import numpy as np

from jaxoverlap.core import Launch
from jaxoverlap.device.step import FAULT_NONE, FAULT_UNWRITTEN

_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.intp): np.uintp}


def check_range(launch: Launch, what: str, values: np.ndarray, limit: int) -> None:
    """`values` int32 or intp [n]."""
    unsigned = values.view(_UNSIGNED[values.dtype])  # negative ones are large
    if np.count_nonzero(unsigned >= limit):  # `any` is Python inside
        raise ValueError(
            f"launch {launch.number}: {what} must be at least 0 and below {limit}, not {values.min()} to {values.max()}"
        )


class SlotRange:
    """Checks that launches name slots below `rows`, each array of slots once: a launch's arrays are never rewritten,
    and a batch that stands still brings the same one again."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._checked: np.ndarray | None = None

    def check(self, launch: Launch) -> None:
        """Raises ValueError naming what is out of range."""
        if launch.slots is not self._checked:
            check_range(launch, "slot", launch.slots, self._rows)
            self._checked = launch.slots


def raise_faults(launch: Launch, faults: np.ndarray) -> None:
    for row in np.flatnonzero(faults != FAULT_NONE):
        slot = int(launch.slots[row])
        what = "a row that no step had written since" if faults[row] == FAULT_UNWRITTEN else "another length's row"
        raise RuntimeError(f"launch {launch.number}: slot {slot} read {what} from the FutureMap")
