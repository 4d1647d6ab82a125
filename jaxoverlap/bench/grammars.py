"""The price of grammars: decode steps of a batch of which a share is constrained, in the normal loop, in the overlap
loop, and in the overlap loop that delays the sampling only when needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Runner
from jaxoverlap.engine import Engine
from jaxoverlap.loading import ServedModel
from jaxoverlap.progress import Report
from jaxoverlap.scheduler.grammar_queue import GrammarBackend
from jaxoverlap.trace.bubbles import DELAYED_SAMPLING, bubbles
from jaxoverlap.trace.events import Trace
from jaxoverlap.trace.summary import percentiles, step_times

PROMPT = 16  # random tokens
ROUNDS = 3  # of each loop in turn
LOOPS: dict[str, dict[str, Any]] = {
    "normal": {"disable_overlap_schedule": True},
    "overlap": {},
    "when-needed": {"delay_sampling": "when-needed"},
}


def schema(steps: int) -> str:
    """Records that go on for at least `steps` tokens."""
    record = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": record, "minItems": steps})


def measure(
    config: EngineConfig,
    model: ServedModel,
    runner: Runner,
    backend: GrammarBackend,
    shares: Sequence[float],
    batches: Sequence[int],
    steps: int,
    report: Report,
) -> list[dict[str, Any]]:
    """One row a batch and share: its "constrained" requests, whether all loops gave the same tokens ("tokens_equal"),
    and by loop "step_ms", "mask_ms" and "idle_ms" a decode step (the last caused by delayed sampling), and how many
    launches had their sampling "delayed" or "not_delayed" in all rounds."""
    assert config.max_total_tokens is not None
    engines = {
        loop: Engine.from_parts(
            dataclasses.replace(config, **settings), model, runner, config.max_total_tokens, grammar_backend=backend
        )
        for loop, settings in LOOPS.items()
    }
    run(engines["normal"], 1, 1, steps)  # compiles the schema
    out, done, total = [], 0, len(batches) * len(shares) * ROUNDS * len(LOOPS)
    for batch in batches:
        for share in shares:
            constrained = round(share * batch)
            runs: dict[str, list[Trace]] = {loop: [] for loop in LOOPS}
            tokens: list[list[list[int]]] = []
            before = {loop: engine.metrics() for loop, engine in engines.items()}
            for _ in range(ROUNDS):
                for loop, engine in engines.items():
                    report("measure", done, total)
                    trace, ids = run(engine, batch, constrained, steps)
                    runs[loop].append(trace)
                    tokens.append(ids)
                    done += 1
            loops = {loop: figures(runs[loop], batch, before[loop], engines[loop].metrics()) for loop in LOOPS}
            equal = all(ids == tokens[0] for ids in tokens)
            row = {"batch": batch, "share": share, "constrained": constrained, "tokens_equal": equal}
            out.append({**row, "loops": loops})
    report("measure", total, total)
    return out


def run(engine: Engine, batch: int, constrained: int, steps: int) -> tuple[Trace, list[list[int]]]:
    """The trace of `batch` requests of `steps` tokens, the first `constrained` with a grammar, and their tokens."""
    engine.flush_cache()
    prompts = np.random.default_rng(0).integers(3, engine.model.config.vocab_size, (batch, PROMPT)).tolist()
    free = {"max_new_tokens": steps, "temperature": 0.0, "ignore_eos": True}
    params = [{**free, "json_schema": schema(steps)} if i < constrained else free for i in range(batch)]
    with engine.trace() as trace:
        results = engine.generate(input_ids=prompts, sampling_params=params)
    return trace, [result["output_ids"] for result in results]


def figures(traces: list[Trace], batch: int, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    times: list[float] = []
    masks = idle = 0.0
    for trace in traces:
        full = {s.launch for s in trace.host if s.kind == "wait" and s.mode == "DECODE" and s.rows == batch}
        idle += bubbles([trace]).get(DELAYED_SAMPLING, 0.0)
        host = [s for s in trace.host if s.launch in full]
        times += step_times(Trace(host))
        masks += sum(s.length for s in trace.host if s.kind == "mask")
    decodes = max(1, sum(s.mode == "DECODE" and s.kind != "sample" for trace in traces for s in trace.device))
    return {
        "step_ms": percentiles(times),
        "mask_ms": 1e3 * masks / decodes,
        "idle_ms": 1e3 * idle / decodes,
        "delayed": after["sampling_delayed"] - before["sampling_delayed"],
        "not_delayed": after["sampling_not_delayed"] - before["sampling_not_delayed"],
    }


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("batch", "constrained", "loop", "step p50 / p90", "mask", "idle", "delayed", "not delayed", "tokens"):
        table.add_column(name, justify="right")
    for x in rows:
        for loop, y in x["loops"].items():
            table.add_row(
                *((str(x["batch"]), str(x["constrained"])) if loop == "normal" else ("", "")),
                loop,
                f"{y['step_ms']['p50']:.2f} / {y['step_ms']['p90']:.2f}",
                f"{y['mask_ms']:.3f}",
                f"{y['idle_ms']:.3f}",
                str(y["delayed"]),
                str(y["not_delayed"]),
                ("equal" if x["tokens_equal"] else "differ") if loop == "normal" else "",
                end_section=loop == list(LOOPS)[-1],
            )
    console.print(table)
