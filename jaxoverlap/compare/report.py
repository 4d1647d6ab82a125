"""A comparison as figures, and as a table and timelines for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.compare.measure import LOOPS, Comparison, Run
from jaxoverlap.trace.bubbles import CAUSES
from jaxoverlap.trace.summary import percentiles, summarize
from jaxoverlap.trace.timeline import LEGEND, lanes, window

TIMELINE_STEPS = 4


def figures(comparison: Comparison) -> dict[str, Any]:
    """All that was measured, as plain JSON values: per loop trace/summary.py's figures over all runs, "tokens_per_s"
    and "ttft_ms" (time to the first token, which for a request that waits includes the waiting)."""
    first = comparison.first_difference
    return {
        "tokens_equal": first is None,
        "first_difference": first,
        "requests": len(comparison.prompts),
        "prompt_tokens": sum(len(p) for p in comparison.prompts),
        "output_tokens": sum(len(ids) for ids in comparison.runs["normal"][0].output_ids),
        "repeats": len(comparison.runs["normal"]),
        "loops": {loop: _loop(comparison.runs[loop]) for loop in LOOPS},
    }


def _loop(runs: list[Run]) -> dict[str, Any]:
    rates = [run.tokens_per_s for run in runs]
    return {
        **summarize([run.trace for run in runs]),
        "tokens_per_s": {"median": float(np.median(rates)), "min": min(rates), "max": max(rates)},
        "ttft_ms": percentiles([t for run in runs for t in run.first_token]),
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
    console.print(verdict(data), style="bold green" if data["tokens_equal"] else "bold red")
    width = max(60, min(100, console.width))
    for loop in LOOPS:
        trace = comparison.runs[loop][-1].trace
        console.print(f"\n{loop}: {TIMELINE_STEPS} decode steps as measured", style="bold")
        for line in lanes(trace, *window(trace, TIMELINE_STEPS), width):
            console.print(line, markup=False, highlight=False, no_wrap=True, overflow="crop", crop=False)
    for line in LEGEND:
        console.print(line, style="dim", markup=False, highlight=False)


def verdict(data: dict[str, Any]) -> str:
    """ "tokens equal", or where they part first."""
    d = data["first_difference"]
    if d is None:
        return (
            f"tokens equal: {data['requests']} requests, {data['output_tokens']} tokens, {data['repeats']} runs a loop"
        )
    return (
        f"tokens differ: request {d['request']}, output token {d['position']}: "
        f"{d['expected']} in the first normal run, {d['got']} in {d['loop']} run {d['repeat'] + 1}"
    )


def _table(data: dict[str, Any]) -> Table:
    title = (
        f"{data['model']} on {data['device']}: {data['requests']} requests, {data['repeats']} interleaved runs a loop"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for loop in LOOPS:
        table.add_column(loop, justify="right")
    loops = [data["loops"][loop] for loop in LOOPS]
    rows: list[tuple[str, list[str]]] = [
        ("decode step p50 / p90 (ms)", [_pair(x["step_ms"]) for x in loops]),
        ("host work per step p50 / p90 (ms)", [_pair(x["host_ms"]) for x in loops]),
        ("wait for the device p50 / p90 (ms)", [_pair(x["wait_ms"]) for x in loops]),
        ("host work hidden behind a step", [_share(x["hidden"]) for x in loops]),
        ("device busy", [_share(x["device_busy"]) for x in loops]),
        ("tokens/s, median (min - max)", [_rate(x["tokens_per_s"]) for x in loops]),
        ("time to first token p50 / p90 (ms)", [_pair(x["ttft_ms"]) for x in loops]),
        ("launches", [str(x["launches"]) for x in loops]),
        ("device idle, all runs (ms)", [_short(x["idle_ms"]) for x in loops]),
    ]
    if any("accept_rates" in x for x in loops):
        rows += [
            ("tokens a row and verify step", [_short(x.get("tokens_a_verify_step")) for x in loops]),
            ("drafts accepted, by place (%)", [_rates(x.get("accept_rates", ())) for x in loops]),
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


def _rates(values: Sequence[float]) -> str:
    return " / ".join(f"{100 * x:.0f}" for x in values) or "-"


def _rate(values: dict[str, float]) -> str:
    return f"{values['median']:.1f} ({values['min']:.1f} - {values['max']:.1f})"
