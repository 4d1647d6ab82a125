"""Runs the same requests through both loops, of one or more runners, and keeps what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxoverlap.compare.memory import PeakMemory
from jaxoverlap.compare.schedule import ScheduleLog
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import RequestError
from jaxoverlap.engine import Engine
from jaxoverlap.progress import Report
from jaxoverlap.trace.events import Trace

LOOPS = ("normal", "overlap")
WARM_UP_TOKENS = 4


@dataclass(slots=True)
class Run:
    """One pass of one loop over all requests. Times in seconds from the submission of all."""

    output_ids: list[list[int]]
    first_token: list[float]  # of each request, as its caller saw it
    wall: float
    trace: Trace
    schedule: list[dict[str, Any]] = field(default_factory=list)  # see ScheduleLog.take
    memory_rise: int | None = None  # bytes of the process's resident memory over what it had before
    accepted: np.ndarray | None = None  # int64 [drafts + 1]: verify steps by how many drafts counted, of all requests

    @property
    def tokens_per_s(self) -> float:
        return sum(len(ids) for ids in self.output_ids) / self.wall


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison by name: that of the loop, behind that of the runner where there are several."""

    prompts: list[list[int]]
    runs: dict[str, list[Run]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.runs)

    @property
    def expected(self) -> Run:
        return self.runs[self.names[0]][0]

    @property
    def first_difference(self) -> dict[str, Any] | None:
        """None when every run gave the same tokens."""
        return next(self.differences(), None)

    def differences(self) -> Iterator[dict[str, Any]]:
        """Where requests part from the first run of all."""
        for repeat in range(len(self.runs[self.names[0]])):
            for name in self.names:
                got = self.runs[name][repeat].output_ids
                for i, (a, b) in enumerate(zip(self.expected.output_ids, got, strict=True)):
                    if a != b:
                        yield difference(i, a, b) | {"loop": name, "repeat": repeat}

    @property
    def first_schedule_difference(self) -> dict[str, Any] | None:
        """None when in each repeat of a loop all runners were asked for the same, in the same order."""
        for loop in LOOPS:
            names = [name for name in self.names if name.split()[-1] == loop]
            for name in names[1:]:
                for repeat, (ours, theirs) in enumerate(zip(self.runs[names[0]], self.runs[name])):
                    for i, (a, b) in enumerate(itertools.zip_longest(ours.schedule, theirs.schedule)):
                        if a != b:
                            return {"loop": name, "repeat": repeat, "event": i, "expected": a, "got": b}
        return None


def difference(request: int, expected: list[int], got: list[int]) -> dict[str, Any]:
    """Where two different outputs of a request part: "position", and the token of each there (None past its end)."""
    position = next((j for j, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
    at = [ids[position] if position < len(ids) else None for ids in (expected, got)]
    return {"request": request, "position": position, "expected": at[0], "got": at[1]}


def both_loops(base: Engine) -> dict[str, Engine]:
    """An engine for each loop on `base`'s model and compiled programs."""
    engines = {}
    runner = ScheduleLog(base.runner)
    for loop in LOOPS:
        config: EngineConfig = dataclasses.replace(base.config, disable_overlap_schedule=loop == "normal")
        engines[loop] = Engine.from_parts(config, base.model, runner, base.max_total_tokens)
    return engines


def all_loops(bases: Mapping[str, Engine]) -> dict[str, Engine]:
    """Both loops of every runner's engine, named as Comparison names them."""
    several = len(bases) > 1
    return {
        f"{name} {loop}" if several else loop: engine
        for name, base in bases.items()
        for loop, engine in both_loops(base).items()
    }


def compare(
    engines: Mapping[str, Engine],
    prompts: Sequence[list[int]],
    params: dict[str, Any],
    repeats: int,
    progress: Report,
) -> Comparison:
    """Interleaves the engines, forwards and then backwards, `repeats` times in all, after a short unmeasured pass.
    No pass finds prefixes that another has cached. Raises RequestError for a prompt that does not fit."""
    short = {**params, "max_new_tokens": min(WARM_UP_TOKENS, params["max_new_tokens"])}
    for engine in engines.values():
        refused = [r for r in engine.generate(input_ids=list(prompts), sampling_params=short) if _message(r)]
        if refused:
            raise RequestError(str(_message(refused[0])))
    comparison = Comparison([list(p) for p in prompts], {name: [] for name in engines})
    for repeat in range(repeats):
        for name in list(engines) if repeat % 2 == 0 else list(engines)[::-1]:
            done = sum(len(runs) for runs in comparison.runs.values())
            progress("measure", done, len(engines) * repeats)
            comparison.runs[name].append(run(engines[name], prompts, params))
    progress("measure", len(engines) * repeats, len(engines) * repeats)
    return comparison


def run(engine: Engine, prompts: Sequence[list[int]], params: dict[str, Any]) -> Run:
    """One measured pass: all requests submitted at once, streamed, every turn traced."""
    engine.flush_cache()
    log = engine.runner if isinstance(engine.runner, ScheduleLog) else ScheduleLog(engine.runner)
    log.take()
    outputs: list[list[int]] = [[] for _ in prompts]
    first: list[float | None] = [None] * len(prompts)
    histograms: list[list[int]] = []
    with PeakMemory() as memory, engine.trace() as trace:
        begin = time.perf_counter()
        for chunk in engine.generate(input_ids=list(prompts), sampling_params=params, stream=True):
            i = chunk["index"]
            outputs[i] = chunk["output_ids"]
            if first[i] is None and outputs[i]:
                first[i] = time.perf_counter() - begin
            if "spec_accept_histogram" in chunk["meta_info"]:
                histograms.append(chunk["meta_info"]["spec_accept_histogram"])
        wall = time.perf_counter() - begin
    accepted = np.sum(histograms, axis=0) if histograms else None
    return Run(outputs, [t for t in first if t is not None], wall, trace, log.take(), memory.rise, accepted)


def _message(result: dict[str, Any]) -> str | None:
    reason = result["meta_info"]["finish_reason"]
    return reason["message"] if reason["type"] == "abort" else None
