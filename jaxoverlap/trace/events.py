"""What a trace is made of: spans of time on the host and on the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Kinds of host time that are no waiting.
WORK = ("receive", "compose", "launch", "mask", "sample", "process", "stream")
LANES = ("host", "launch", "delayed sampling", "device", "wait")
LANE_OF = {  # of a host span; the others are "host"
    "launch": "launch",
    "mask": "delayed sampling",
    "sample": "delayed sampling",
    "wait": "wait",
    "sync": "wait",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in seconds of `time.perf_counter`.

    Host kinds: `receive` (requests and operations that came in), `compose` (until the launch, with masks known by
    then), `launch` and `sample` (the call that gives the device work), `mask` (of a delayed sampling), `wait` (blocked
    on a result), `sync` (blocked on what the other ranks tell), `process` (from the result on, and what is left of the
    turn), `stream` (outputs to callers, text included).
    Device kinds: `step`, or with delayed sampling `forward` and `sample`.
    `cause` says of a host span why the device stands still where it does meanwhile; "" for host work that comes late.
    """

    kind: str
    begin: float
    end: float
    turn: int
    launch: int = 0  # number of the launch concerned; 0: none
    mode: str = ""  # of the launch, as its rows are: all ranks' where they share it; unknown if the trace began later
    rows: int = 0
    cause: str = ""
    tokens: int = 0  # of a device step that verifies: what its rows gained, drafts that counted included

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Trace:
    """Spans in the order in which they ended. A device step begins at its launch call or at the end of the step before,
    whichever is later (what the device does inside is not seen), and ends when its result was seen ready; a forward
    whose sampling is delayed when it was seen ready, or with its sampling where it was busy until then. A simulated
    device tells its own times."""

    host: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)

    @property
    def begin(self) -> float:
        return min((s.begin for s in (*self.host, *self.device)), default=0.0)

    @property
    def end(self) -> float:
        return max((s.end for s in (*self.host, *self.device)), default=0.0)

    def lanes(self) -> dict[str, list[Span]]:
        """The spans of each of LANES; delayed sampling only where there is some."""
        out: dict[str, list[Span]] = {lane: [] for lane in LANES}
        for span in self.host:
            out[LANE_OF.get(span.kind, "host")].append(span)
        out["device"] = self.device
        if not out["delayed sampling"]:
            del out["delayed sampling"]
        return out

    def records(self) -> list[dict[str, Any]]:
        """One flat dict a span, `lane` included: `pandas.DataFrame(trace.records())`."""
        return [{"lane": lane, **asdict(span)} for lane, spans in self.lanes().items() for span in spans]

    def between(self, begin: float, end: float) -> Trace:
        """The spans that overlap [begin, end], not cut."""

        def inside(spans: list[Span]) -> list[Span]:
            return [s for s in spans if s.end > begin and s.begin < end]

        return Trace(inside(self.host), inside(self.device))
