"""How far a process's memory rises while something runs."""

from __future__ import annotations

import re
from pathlib import Path

_PEAK_RESET = "5"  # what clears VmHWM, see proc(5), clear_refs


class PeakMemory:
    """`with PeakMemory() as memory`: afterwards `memory.rise` is the highest resident size inside over that at the
    begin, in bytes. None where the system does not tell (it does on Linux)."""

    rise: int | None = None

    def __enter__(self) -> PeakMemory:
        try:
            Path("/proc/self/clear_refs").write_text(_PEAK_RESET)
            self._begin = _status("VmRSS")
        except OSError:
            self._begin = None
        return self

    def __exit__(self, *_: object) -> None:
        peak = None if self._begin is None else _status("VmHWM")
        self.rise = None if peak is None or self._begin is None else max(0, peak - self._begin)


def _status(field: str) -> int | None:
    """Bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
