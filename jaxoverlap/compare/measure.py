"""Runs the same requests through both loops and keeps what was measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
    accepted: np.ndarray | None = None  # int64 [drafts + 1]: verify steps by how many drafts counted, of all requests

    @property
    def tokens_per_s(self) -> float:
        return sum(len(ids) for ids in self.output_ids) / self.wall


@dataclass(slots=True)
class Comparison:
    """All runs of a comparison; `first_difference` is None when every run of both loops gave the same tokens."""

    prompts: list[list[int]]
    runs: dict[str, list[Run]] = field(default_factory=lambda: {loop: [] for loop in LOOPS})

    @property
    def first_difference(self) -> dict[str, Any] | None:
        expected = self.runs["normal"][0].output_ids
        for repeat in range(len(self.runs["normal"])):
            for loop in LOOPS:
                got = self.runs[loop][repeat].output_ids
                for i, (a, b) in enumerate(zip(expected, got, strict=True)):
                    if a != b:
                        return difference(i, a, b) | {"loop": loop, "repeat": repeat}
        return None


def difference(request: int, expected: list[int], got: list[int]) -> dict[str, Any]:
    """Where two different outputs of a request part: "position", and the token of each there (None past its end)."""
    position = next((j for j, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
    at = [ids[position] if position < len(ids) else None for ids in (expected, got)]
    return {"request": request, "position": position, "expected": at[0], "got": at[1]}


def both_loops(base: Engine) -> dict[str, Engine]:
    """An engine for each loop on `base`'s model and compiled programs."""
    engines = {}
    for loop in LOOPS:
        config: EngineConfig = dataclasses.replace(base.config, disable_overlap_schedule=loop == "normal")
        engines[loop] = Engine.from_parts(config, base.model, base.runner, base.max_total_tokens)
    return engines


def compare(
    base: Engine, prompts: Sequence[list[int]], params: dict[str, Any], repeats: int, progress: Report
) -> Comparison:
    """Interleaves the loops, first one first and then the other, `repeats` times each, after a short unmeasured pass.
    No pass finds prefixes that another has cached. Raises RequestError for a prompt that does not fit."""
    engines = both_loops(base)
    short = {**params, "max_new_tokens": min(WARM_UP_TOKENS, params["max_new_tokens"])}
    for engine in engines.values():
        refused = [r for r in engine.generate(input_ids=list(prompts), sampling_params=short) if _message(r)]
        if refused:
            raise RequestError(str(_message(refused[0])))
    comparison = Comparison([list(p) for p in prompts])
    for repeat in range(repeats):
        for loop in LOOPS if repeat % 2 == 0 else LOOPS[::-1]:
            done = sum(len(runs) for runs in comparison.runs.values())
            progress("measure", done, len(LOOPS) * repeats)
            comparison.runs[loop].append(run(engines[loop], prompts, params))
    progress("measure", len(LOOPS) * repeats, len(LOOPS) * repeats)
    return comparison


def run(engine: Engine, prompts: Sequence[list[int]], params: dict[str, Any]) -> Run:
    """One measured pass: all requests submitted at once, streamed, every turn traced."""
    engine.flush_cache()
    outputs: list[list[int]] = [[] for _ in prompts]
    first: list[float | None] = [None] * len(prompts)
    histograms: list[list[int]] = []
    with engine.trace() as trace:
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
    return Run(outputs, [t for t in first if t is not None], wall, trace, accepted)


def _message(result: dict[str, Any]) -> str | None:
    reason = result["meta_info"]["finish_reason"]
    return reason["message"] if reason["type"] == "abort" else None
