"""What a runner was asked for, in order, so that the schedules of two runners can be compared launch for launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxoverlap.core import Launch, Runner, Sample, StepResult


class ScheduleLog:
    """A core.Runner that notes what passes through to `inner`, and otherwise is it."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self._asked: list[tuple[str, Launch | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, launches: list[Launch]) -> list[Any]:
        self._asked += [("launch", launch) for launch in launches]
        return self.inner.launch(launches)

    def sample(self, samples: list[Sample]) -> None:
        self._asked += [("sample", None) for _ in samples]
        self.inner.sample(samples)

    def wait(self, handle: Any) -> StepResult:
        self._asked.append(("result", None))
        return self.inner.wait(handle)

    def is_ready(self, handle: Any) -> bool:
        return self.inner.is_ready(handle)

    def take(self) -> list[dict[str, Any]]:
        """All since the last time: {"event": "launch", "sample" or "result"}, and of a launch its mode and its rows:
        which requests, numbered as they were first launched, their lengths in the cache, and with a prefill how much of
        them is new and how much was there."""
        asked, self._asked = self._asked, []
        numbers: dict[str, int] = {}
        out: list[dict[str, Any]] = []
        for event, launch in asked:
            out.append({"event": event})
            if launch is not None:
                requests = [numbers.setdefault(r.rid, len(numbers)) for r in launch.requests]
                out[-1] |= {"mode": launch.mode.value, "requests": requests} | _lengths(launch)
        return out


def _lengths(launch: Launch) -> dict[str, list[int]]:
    arrays: dict[str, np.ndarray | None] = {
        name: getattr(launch, name) for name in ("seq_lens", "extend_lens", "prefix_lens")
    }
    return {name: lens.tolist() for name, lens in arrays.items() if lens is not None}
