"""`jaxoverlap replay`: scenarios through both loops, as traces or as something to read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, TextIO

from rich.console import Console

from jaxoverlap.cli import UsageError, add_command
from jaxoverlap.config import EngineConfig
from jaxoverlap.paths import cache_dir
from jaxoverlap.progress import bars
from jaxoverlap.replay.play import RunnerFactory, record, trace_of
from jaxoverlap.replay.scenario import Scenario, ScenarioError, load_scenario
from jaxoverlap.replay.show import show

DEPARTURES = ("overrun", "finish_order", "strict_aliasing")
UNKNOWN_WIDTH = 160  # columns, where the output is no terminal and COLUMNS is not set


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "replay", "play scenarios through both loops and print their traces", run)
    parser.add_argument("files", nargs="+", metavar="SCENARIO.json", help="only `scenario` is read of a file")
    parser.add_argument("--show", action="store_true", help="the turns to read, not JSON")
    parser.add_argument("--explain", action="store_true", help="why each turn went so, not JSON")
    group = parser.add_argument_group("departures from SGLang", "no trace of SGLang has these")
    group.add_argument("--overrun", choices=("sglang", "skip-known"), default="sglang", help=about("overrun"))
    group.add_argument("--finish-order", choices=("sglang", "stop-first"), default="sglang", help=about("finish_order"))
    aliasing = argparse.BooleanOptionalAction
    group.add_argument("--strict-aliasing", action=aliasing, default=True, help=about("strict_aliasing"))


def run(args: argparse.Namespace) -> int:
    scenarios = load_all(args.files)
    from jaxoverlap.device.compile_cache import enable_compilation_cache
    from jaxoverlap.replay.device import ReplayDevice

    enable_compilation_cache(cache_dir() / "compiled")
    settings = {name: getattr(args, name) for name in DEPARTURES}
    device = ReplayDevice(scenarios)
    try:
        with bars() as report:
            device.warm_up(lambda done, total, _: report("compile", done, total))
        replay(scenarios, device.runner, sys.stdout, turns=args.show, reasons=args.explain, **settings)
    finally:
        device.shutdown()
    return 0


def about(setting: str) -> str:
    return EngineConfig.__dataclass_fields__[setting].metadata["about"]


def load_all(files: list[str]) -> list[Scenario]:
    """Raises UsageError that names every bad file."""
    scenarios, errors = [], []
    for file in files:
        try:
            scenarios.append(load_scenario(file))
        except ScenarioError as e:
            errors.append(str(e))
    if errors:
        raise UsageError("\n".join(errors))
    return scenarios


def replay(
    scenarios: list[Scenario],
    make_runner: RunnerFactory,
    out: TextIO,
    *,
    turns: bool = False,
    reasons: bool = False,
    **settings: Any,
) -> None:
    """A line of JSON for each scenario: name, normal, overlap. With `turns` or `reasons`: text to read. `settings`:
    EngineConfig fields beside the scenarios' own."""
    width = None if out.isatty() or "COLUMNS" in os.environ else UNKNOWN_WIDTH
    console = Console(file=out, width=width, highlight=False)
    for scenario in scenarios:
        normal = record(scenario, False, make_runner, **settings)
        overlap = record(scenario, True, make_runner, **settings)
        if turns or reasons:
            show(console, scenario, normal, overlap, turns=turns, reasons=reasons)
            continue
        line = {"name": scenario.name, "normal": trace_of(normal), "overlap": trace_of(overlap)}
        out.write(json.dumps(line, separators=(",", ":")) + "\n")
        out.flush()
