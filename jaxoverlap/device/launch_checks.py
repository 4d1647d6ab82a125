"""What a runner refuses of a launch, and what the poisoned FutureMap found."""

from __future__ import annotations

import numpy as np

from jaxoverlap.core import Launch
from jaxoverlap.device.step import FAULT_NONE, FAULT_UNWRITTEN


def check_range(launch: Launch, what: str, values: np.ndarray, limit: int) -> None:
    """`values` int32."""
    if np.count_nonzero(values.view(np.uint32) >= limit):  # negative ones too, and no Python inside NumPy
        raise ValueError(
            f"launch {launch.number}: {what} must be at least 0 and below {limit}, not {values.min()} to {values.max()}"
        )


def check_distinct(launch: Launch) -> None:
    """An entry named twice with the same page is harmless; with two pages the order of a scatter would decide."""
    entries, with_pages = (len(np.unique(x, axis=1).T) for x in (launch.page_writes[:2], launch.page_writes))
    if entries < with_pages:
        raise ValueError(f"launch {launch.number} writes an entry of the page table twice")


def raise_faults(launch: Launch, faults: np.ndarray) -> None:
    for row in np.flatnonzero(faults != FAULT_NONE):
        slot = int(launch.slots[row])
        what = "a row that no step had written since" if faults[row] == FAULT_UNWRITTEN else "another length's row"
        raise RuntimeError(f"launch {launch.number}: slot {slot} read {what} from the FutureMap")
