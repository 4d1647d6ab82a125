"""What a trace is made of: spans of time on the host and on the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

WORK = ("compose", "launch", "sample", "sync", "process", "stream")  # kinds of host time that are not waiting


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in seconds of `time.perf_counter`.

    Host kinds: `compose` (all of a turn before its first result: receive, compose, enqueue), `launch` and `sample`
    (the call that gives the device work), `sync`, `wait` (blocked on a result), `process` (all of a turn behind its
    first result), `stream` (outputs to callers, text included).
    Device kind: `step`.
    """

    kind: str
    begin: float
    end: float
    turn: int
    launch: int = 0  # number of the launch concerned; 0: none
    mode: str = ""
    rows: int = 0

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Trace:
    """Spans in the order in which they began. A device step begins at its launch call or at the end of the step before,
    whichever is later (what the device does inside is not seen), and ends when its result was seen ready."""

    host: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)

    @property
    def begin(self) -> float:
        return min((s.begin for s in (*self.host, *self.device)), default=0.0)

    @property
    def end(self) -> float:
        return max((s.end for s in (*self.host, *self.device)), default=0.0)

    def records(self) -> list[dict[str, Any]]:
        """One flat dict a span, `lane` included: `pandas.DataFrame(trace.records())`."""
        lanes = (("host", self.host), ("device", self.device))
        return [{"lane": lane, **asdict(span)} for lane, spans in lanes for span in spans]

    def between(self, begin: float, end: float) -> Trace:
        """The spans that overlap [begin, end], not cut."""

        def inside(spans: list[Span]) -> list[Span]:
            return [s for s in spans if s.end > begin and s.begin < end]

        return Trace(inside(self.host), inside(self.device))
