"""A comparison as figures, and as a table and timelines for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.compare import against_sglang
from jaxoverlap.compare.measure import LOOPS, Comparison, Run
from jaxoverlap.trace.bubbles import CAUSES
from jaxoverlap.trace.summary import pauses, percentiles, summarize
from jaxoverlap.trace.timeline import LEGEND, lanes, window

TIMELINE_STEPS = 4
MARGIN = 0.25  # logits: two steps of bfloat16 between 16 and 32


def figures(comparison: Comparison) -> dict[str, Any]:
    """All that was measured, as plain JSON values: per loop (of each runner) trace/summary.py's figures over all runs,
    "tokens_per_s", "ttft_ms" (time to the first token, which for a request that waits includes the waiting), "gap_ms"
    (from the end of a device step to the begin of the next) and "memory_rise_mb" (the most by which the process's
    resident memory rose in a run; None where the system does not tell). "schedules_equal": in each loop all runners
    were asked for the same."""
    first, first_schedule = comparison.first_difference, comparison.first_schedule_difference
    return {
        "tokens_equal": first is None,
        "first_difference": first,
        "schedules_equal": first_schedule is None,
        "first_schedule_difference": first_schedule,
        "requests": len(comparison.prompts),
        "prompt_tokens": sum(len(p) for p in comparison.prompts),
        "output_tokens": sum(len(ids) for ids in comparison.expected.output_ids),
        "repeats": len(comparison.runs[comparison.names[0]]),
        "loops": {name: _loop(runs) for name, runs in comparison.runs.items()},
    }


def _loop(runs: list[Run]) -> dict[str, Any]:
    rates = [run.tokens_per_s for run in runs]
    rises = [run.memory_rise for run in runs if run.memory_rise is not None]
    return {
        **summarize([run.trace for run in runs]),
        "tokens_per_s": {"median": float(np.median(rates)), "min": min(rates), "max": max(rates)},
        "ttft_ms": percentiles([t for run in runs for t in run.first_token]),
        "gap_ms": percentiles([gap for run in runs for gap in pauses(run.trace)]),
        "memory_rise_mb": max(rises) / 1e6 if rises else None,
        **_acceptance(runs),
        "wall_s": [run.wall for run in runs],
    }


def _acceptance(runs: list[Run]) -> dict[str, Any]:
    """ "tokens_a_verify_step" of a row, and "accept_rates" of the drafts at each place of a chain; {} without any."""
    histograms = [run.accepted for run in runs if run.accepted is not None]
    if not histograms:
        return {}
    accepted = np.sum(histograms, axis=0)
    reached = accepted[::-1].cumsum()[::-1]
    rates = reached / reached[0]
    return {"tokens_a_verify_step": float(rates.sum()), "accept_rates": rates[1:].tolist()}


def show(console: Console, comparison: Comparison, data: dict[str, Any]) -> None:
    """Prints the table, whether the tokens are equal, and a timeline of each loop's last run."""
    console.print(_table(data))
    if "sglang" in data:
        console.print(against_sglang.table(data["sglang"]))
    console.print(verdict(data), style="bold green" if same_tokens(data) else "bold red")
    if len(data["loops"]) > len(LOOPS):
        console.print(schedule_verdict(data), style="bold green" if data["schedules_equal"] else "bold red")
    for note in data.get("notes", ()):
        console.print(note, highlight=False, markup=False)
    width = max(60, min(100, console.width))
    for name in comparison.names:
        trace = comparison.runs[name][-1].trace
        console.print(f"\n{name}: {TIMELINE_STEPS} decode steps as measured", style="bold")
        for line in lanes(trace, *window(trace, TIMELINE_STEPS), width):
            console.print(line, markup=False, highlight=False, no_wrap=True, overflow="crop", crop=False)
    for line in LEGEND:
        console.print(line, style="dim", markup=False, highlight=False)


def same_tokens(data: dict[str, Any]) -> bool:
    """Equal, or in bfloat16 different by rounding alone."""
    margin = data.get("largest_margin")
    return bool(data["tokens_equal"] or (margin is not None and margin <= MARGIN))


def agrees(data: dict[str, Any]) -> bool:
    """Whether all that was compared is the same: tokens (see `same_tokens`), schedules, and what came of drafts."""
    drafts = data.get("speculative")
    same = drafts is None or (drafts["tokens_equal"] and drafts["same_tokens"])
    return bool(same_tokens(data) and data["schedules_equal"] and same)


def verdict(data: dict[str, Any]) -> str:
    """ "tokens equal", or where they part first."""
    d = data["first_difference"]
    if d is None:
        return (
            f"tokens equal: {data['requests']} requests, {data['output_tokens']} tokens, {data['repeats']} runs a loop"
        )
    text = (
        f"tokens differ: request {d['request']}, output token {d['position']}: "
        f"{d['expected']} in the first {next(iter(data['loops']))} run, {d['got']} in {d['loop']} run {d['repeat'] + 1}"
    )
    if data.get("largest_margin") is None:
        return text
    return f"{text}; where outputs part, the two tokens' logits differ by {data['largest_margin']:.2g} at most"


def schedule_verdict(data: dict[str, Any]) -> str:
    """ "schedules equal", or where those of two runners part first."""
    d = data["first_schedule_difference"]
    if d is None:
        return "schedules equal: in each loop all runners had the same launches and results, in the same order"
    return f"schedules differ: {d['loop']} run {d['repeat'] + 1}, event {d['event']}: {d['got']}, not {d['expected']}"


def _table(data: dict[str, Any]) -> Table:
    title = (
        f"{data['model']} on {data['device']}: {data['requests']} requests, {data['repeats']} interleaved runs a loop"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for name in data["loops"]:
        table.add_column(name, justify="right")
    loops = list(data["loops"].values())
    rows: list[tuple[str, list[str]]] = [
        ("decode step p50 / p90 (ms)", [_pair(x["step_ms"]) for x in loops]),
        ("host work per step p50 / p90 (ms)", [_pair(x["host_ms"]) for x in loops]),
        ("wait for the device p50 / p90 (ms)", [_pair(x["wait_ms"]) for x in loops]),
        ("launch call alone, mean (ms)", [_short(x["parts_ms"].get("launch")) for x in loops]),
        ("gap between device steps p50 / p90 (ms)", [_pair(x["gap_ms"]) for x in loops]),
        ("host work hidden behind a step", [_share(x["hidden"]) for x in loops]),
        ("device busy", [_share(x["device_busy"]) for x in loops]),
        *_rates([x["tokens_per_s"] for x in loops]),
        ("time to first token p50 / p90 (ms)", [_pair(x["ttft_ms"]) for x in loops]),
        ("memory above the start of a run (MB)", [_short(x["memory_rise_mb"]) for x in loops]),
        ("launches", [str(x["launches"]) for x in loops]),
        ("device idle, all runs (ms)", [_short(x["idle_ms"]) for x in loops]),
    ]
    if any("accept_rates" in x for x in loops):
        rows += [
            ("tokens a row and verify step", [_short(x.get("tokens_a_verify_step")) for x in loops]),
            ("drafts accepted, by place (%)", [_shares(x.get("accept_rates", ())) for x in loops]),
        ]
    causes = [cause for cause in CAUSES if any(cause in x["bubbles_ms"] for x in loops)]
    rows += [(f"  {cause}", [_short(x["bubbles_ms"].get(cause, 0.0)) for x in loops]) for cause in causes]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _pair(values: dict[str, float | None]) -> str:
    if values["p50"] is None:
        return "-"
    return f"{_short(values['p50'])} / {_short(values['p90'])}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _rates(loops: list[dict[str, float]]) -> list[tuple[str, list[str]]]:
    """One row, or, where many columns leave it no room, two."""
    ranges = [f"{x['min']:.1f} - {x['max']:.1f}" for x in loops]
    if len(loops) > 2:
        return [("tokens/s, median", [f"{x['median']:.1f}" for x in loops]), ("  min - max", ranges)]
    return [("tokens/s, median (min - max)", [f"{x['median']:.1f} ({r})" for x, r in zip(loops, ranges)])]


def _shares(values: Sequence[float]) -> str:
    return " / ".join(f"{100 * x:.0f}" for x in values) or "-"
