"""What a turn of steady decode costs the host, by part, with a device that costs nothing. Imports no jax.

Requests stream every token and have an end-of-sequence id to look for. A turn reaches from the beginning of one to the
beginning of the next: scheduler, driver, and handing the tokens to the callers' tickets. Rendering a result (text,
SGLang's dict) is the caller's, and stated apart. So is what tracing adds: to such a turn, and to one with a device step
in it, which hides what the host does meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.bench.load import Load
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Runner, Sample, StepResult, Turn
from jaxoverlap.device.simulated import simulate
from jaxoverlap.driver import Driver
from jaxoverlap.progress import Report, silent
from jaxoverlap.trace.events import Span
from jaxoverlap.trace.recorder import Recorder

PROMPT, CONTEXT, VOCAB, TOKEN = 16, 4096, 32000, 77
WARM_UP = 20  # turns
ROUNDS, SHORTEST_ROUND = 20, 10  # a round: so many turns without tracing, then as many with it
STEP_MS = 1.0  # of the device that is not free: a decode step of a small model on a large GPU
PARTS = ("receive", "compose", "launch", "process", "stream")
SGLANG_US = {1: (400.0, 690.0), 32: (840.0, 1040.0), 256: (2700.0, 3000.0)}
"""SGLang 0.5.14's scheduler per decode step with streaming requests and the overlap loop, driven by a device that costs
nothing: lowest and highest of several runs on 2 cores."""


class FreeRunner:
    """core.Runner of a device that is always done, with the same token for everybody."""

    def __init__(self, rows: int) -> None:
        self._tokens = np.full(rows, TOKEN, np.int32)

    def launch(self, launches: list[Launch]) -> list[Launch]:
        return launches

    def sample(self, samples: list[Sample]) -> None:
        raise ValueError("nothing delays its sampling here")

    def wait(self, handle: Launch) -> StepResult:
        return StepResult(self._tokens[: len(handle.requests)])

    def is_ready(self, handle: Launch) -> bool:
        return True

    def device_spans(self, handle: Launch) -> list[tuple[str, float, float]]:
        return []


class Stopwatch(Driver):
    """Notes when each turn begins."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.begins: list[float] = []

    def turn(self, turn: Turn) -> None:
        self.begins.append(time.perf_counter())
        super().turn(turn)


@dataclass(slots=True)
class Side:
    """`batch` requests that decode, `waiting` more that find no slot, and what their turns took: on a device that is
    free or on one whose steps take `step_ms`."""

    batch: int
    waiting: int
    load: Load
    runner: Runner
    step_ms: float
    plain: list[float] = field(default_factory=list)  # seconds of each turn
    traced: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)  # seconds, of each traced turn
    tracing: list[float] = field(default_factory=list)  # seconds that tracing added to a turn, in each round

    @classmethod
    def make(cls, batch: int, waiting: int, turns: int, step_ms: float = 0.0) -> Side:
        config = EngineConfig(
            device="simulated",
            step_ms=step_ms or None,
            context_length=CONTEXT,
            max_running_requests=batch,
            max_total_tokens=batch * (PROMPT + turns + 64),
            chunked_prefill_size=-1,
        )
        runner: Runner = simulate(config)[1] if step_ms else FreeRunner(batch)
        load = Load(
            config,
            Driver(runner),
            context_length=CONTEXT,
            vocab_size=VOCAB,
            count=batch + waiting,
            prompt_len=PROMPT,
            max_new_tokens=turns + 8,
            ignore_eos=False,
        )
        load.turn_until_decoding(batch)
        load.turn(WARM_UP)
        if len(load.scheduler.waiting) != waiting:
            raise RuntimeError(f"{len(load.scheduler.waiting)} requests wait, not {waiting}")
        return cls(batch, waiting, load, runner, step_ms)

    def time_round(self, turns: int) -> None:
        plain, traced = len(self.plain), len(self.traced)
        self.time_plain(turns)
        self.time_traced(turns)
        self.tracing.append(float(np.median(self.traced[traced:]) - np.median(self.plain[plain:])))

    def time_plain(self, turns: int) -> None:
        self.load.loop.driver = watch = Stopwatch(self.runner)
        self.load.turn(turns)
        self.plain += [b - a for a, b in pairwise(watch.begins)]

    def time_traced(self, turns: int) -> None:
        recorder = Recorder(self.runner)
        self.load.loop.record(recorder)
        self.load.turn(turns)
        self.load.loop.record(None)
        by_turn: dict[int, list[Span]] = {}
        for span in recorder.trace().host:
            by_turn.setdefault(span.turn, []).append(span)
        for spans, after in pairwise(by_turn.values()):
            begin, end = spans[0].begin, after[0].begin
            parts = dict.fromkeys(PARTS, 0.0)
            for span in spans:
                parts["launch" if span.kind == "wait" else span.kind] += span.length
            parts["receive"] += end - begin - sum(parts.values())  # the loop between two turns
            self.traced.append(end - begin)
            self.parts.append(parts)

    def render(self) -> float:
        """Seconds to make one caller's result, all tokens so far in it."""
        times = []
        for ticket in (self.load.call.tickets[: self.batch] * 20)[: max(20, self.batch)]:
            begin = time.perf_counter()
            ticket.render(ticket.snapshot())
            times.append(time.perf_counter() - begin)
        return float(np.median(times))

    def figures(self) -> dict[str, Any]:
        """Microseconds. The parts are those of the traced turns of middling length, scaled to the plain turn."""
        turn = float(np.median(self.plain))
        order = np.argsort(self.traced)
        middle = order[int(0.4 * len(order)) : max(int(0.6 * len(order)), 1)]
        mean = {part: float(np.mean([self.parts[i][part] for i in middle])) for part in PARTS}
        scale = turn / sum(mean.values())
        return {
            "turn_us": 1e6 * turn,
            "turn_us_p10": 1e6 * float(np.percentile(self.plain, 10)),
            "turn_us_p90": 1e6 * float(np.percentile(self.plain, 90)),
            "parts_us": {part: 1e6 * scale * seconds for part, seconds in mean.items()},
            "trace_us": 1e6 * float(np.median(self.tracing)),
            "render_us": 1e6 * self.render(),
            "waiting": self.waiting,
        }


def measure(batches: Sequence[int], waiting: int = 0, turns: int = 1000, report: Report = silent) -> dict[str, Any]:
    """{batch: figures} for `bench host`. All sides take turns with each other, so that a slow moment of the machine
    hits all alike; with `waiting`, each batch is also measured without ("turn_us_none_waiting")."""
    rounds = min(ROUNDS, turns // SHORTEST_ROUND)
    turns //= rounds
    total = WARM_UP + 2 * rounds * turns
    sides = [Side.make(batch, n, total) for batch in batches for n in ([waiting, 0] if waiting else [0])]
    sides += [Side.make(batch, 0, total, STEP_MS) for batch in batches]
    for done in range(rounds):
        report("measure", done, rounds)
        for side in sides:
            side.time_round(turns)
    report("measure", rounds, rounds)
    out: dict[str, Any] = {}
    for side in sides:
        if side.step_ms:
            ratio = float(np.median(side.traced) / np.median(side.plain))
            out[str(side.batch)]["traced_step"] = {"step_ms": side.step_ms, "ratio": ratio}
            continue
        figures = side.figures()
        if str(side.batch) in out:
            out[str(side.batch)]["turn_us_none_waiting"] = figures["turn_us"]
            continue
        out[str(side.batch)] = figures
        if side.batch in SGLANG_US:
            figures["sglang_us"] = list(SGLANG_US[side.batch])
            figures["of_sglang"] = [figures["turn_us"] / us for us in reversed(SGLANG_US[side.batch])]
    return out


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(title="host cost of a decode turn (us): streaming requests, device free", title_justify="left")
    for name in ("batch", "turn", "p10", "p90", *PARTS):
        table.add_column(name, justify="right")
    for batch, x in figures.items():
        parts = [f"{x['parts_us'][part]:.1f}" for part in PARTS]
        spread = [f"{x[name]:.0f}" for name in ("turn_us_p10", "turn_us_p90")]
        table.add_row(batch, f"{x['turn_us']:.1f}", *spread, *parts)
    console.print(table)
    for batch, x in figures.items():
        step_ms, ratio = x["traced_step"]["step_ms"], x["traced_step"]["ratio"]
        tracing = f"tracing adds {x['trace_us']:.1f} us ({100 * x['trace_us'] / x['turn_us']:.0f} %); "
        tracing += f"a turn with a step of {step_ms:g} ms takes {ratio:.3f} times as long with it"
        notes = [tracing, f"a result costs its caller {x['render_us']:.1f} us"]
        if "of_sglang" in x:
            low, high = x["sglang_us"]
            notes.insert(0, f"SGLang 0.5.14's own scheduler: {low:.0f} - {high:.0f} us")
            notes[0] += f", {1 / x['of_sglang'][1]:.1f} - {1 / x['of_sglang'][0]:.1f} times as much"
        if x["waiting"]:
            ratio = x["turn_us"] / x["turn_us_none_waiting"]
            notes.append(f"{x['waiting']:,} waiting: {ratio:.3f} times the turn with none")
        console.print(f"batch {batch}: {'; '.join(notes)}", soft_wrap=True, highlight=False)
