"""The same load through SGLang's own Engine, overlap off and on, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import numpy as np
from rich.table import Table

from jaxoverlap.compare.measure import LOOPS, Comparison
from jaxoverlap.config import EngineConfig
from jaxoverlap.trace.summary import percentiles

RELEASE = "0.5.14"
PROCESS = "jaxoverlap.compare.sglang_process"
SAME_NAME = (
    *("page_size", "chunked_prefill_size", "max_running_requests", "schedule_policy", "disable_radix_cache"),
    *("max_total_tokens", "context_length", "enable_mixed_chunk", "stream_interval"),
)


def check(config: EngineConfig) -> None:
    """Raises ImportError that says what to install, and ValueError for a model that SGLang cannot load."""
    if importlib.util.find_spec("sglang") is None:
        raise ImportError(f'--against-sglang needs SGLang: pip install "sglang=={RELEASE}" (its guide says on what)')
    if config.device == "simulated" or config.model_path == "checksum":
        raise ValueError("--against-sglang needs a model with weights")
    if config.dp_size > 1:
        raise ValueError(f"--against-sglang compares one rank: dp_size must be 1, not {config.dp_size}")


def measure(config: EngineConfig, comparison: Comparison, params: dict[str, Any], repeats: int) -> dict[str, Any]:
    """By loop: "tokens_per_s", "ttft_ms", "step_ms" (between two tokens of a request) and "same_tokens" as our first
    run. The noise of sampling is SGLang's own. Raises OSError with what the process said where it failed."""
    from jaxoverlap.models.registry import directory_of

    kept = {k: v for k, v in params.items() if k != "sampling_seed"}
    settings = {name: getattr(config, name) for name in SAME_NAME if getattr(config, name) is not None}
    settings |= {"model_path": str(directory_of(config.model_path)), "dtype": config.dtype}
    out = {}
    for loop in LOOPS:
        load = {
            "engine": settings | {"disable_overlap_schedule": loop == "normal"},
            "prompts": comparison.prompts,
            "params": kept,
            "repeats": repeats,
        }
        out[loop] = _figures(_run(load), comparison.expected.output_ids)
    return out


def _run(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each run "output_ids" and "arrivals", for each request the seconds at which its tokens came."""
    done = subprocess.run([sys.executable, "-m", PROCESS], input=json.dumps(load), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"SGLang failed: {done.stderr.strip()[-2000:]}")
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return runs


def _figures(runs: list[dict[str, Any]], ours: list[list[int]]) -> dict[str, Any]:
    arrivals = [times for run in runs for times in run["arrivals"] if times]
    rates = [sum(map(len, run["output_ids"])) / max(t[-1] for t in run["arrivals"] if t) for run in runs]
    pairs = [pair for a, b in zip(ours, runs[0]["output_ids"]) for pair in zip(a, b)]
    return {
        "tokens_per_s": {"median": float(np.median(rates)), "min": min(rates), "max": max(rates)},
        "ttft_ms": percentiles([times[0] for times in arrivals]),
        "step_ms": percentiles([step for times in arrivals for step in np.diff(times)]),
        "same_tokens": sum(a == b for a, b in pairs),
        "tokens": sum(map(len, ours)),
    }


def table(data: dict[str, Any]) -> Table:
    out = Table(title="SGLang on the same load", title_justify="left", title_style="bold")
    for name in ("", "step p50 / p90 (ms)", "tokens/s", "first token p50 (ms)", "tokens as ours"):
        out.add_column(name, justify="right" if name else "left")
    for loop, x in data.items():
        step = " / ".join("-" if x["step_ms"][p] is None else f"{x['step_ms'][p]:.1f}" for p in ("p50", "p90"))
        same = f"{x['same_tokens']} of {x['tokens']}"
        out.add_row(loop, step, f"{x['tokens_per_s']['median']:.1f}", f"{x['ttft_ms']['p50']:.1f}", same)
    return out
