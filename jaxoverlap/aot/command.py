"""`jaxoverlap aot`: compile the engine's programs for a GPU that is not there, and say what became of them."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.table import Table

from jaxoverlap.aot.targets import TARGETS
from jaxoverlap.cli import UsageError, add_command, add_json_flag, check_json_flag, console, write_json

CONFIGS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "smollm2-135m", "llama-3.1-8b")


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "aot", "compile for a GPU that is not there", run)
    parser.add_argument("--target", choices=TARGETS, default="h200", help="the GPU")
    parser.add_argument("--config", choices=CONFIGS, default="qwen3-0.6b", help="sizes of the model; no weights needed")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="rows of a batch")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="GPUs: ranks with DP attention [1]")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.batch < 1:
        raise UsageError(f"--batch must be at least 1, not {args.batch}")
    if args.devices < 1:
        raise UsageError(f"--devices must be at least 1, not {args.devices}")
    check_json_flag(args)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs here, on whatever devices there are
    from jaxoverlap.aot.compile import compile_devices, measure, plan
    from jaxoverlap.models.shapes import published

    target = TARGETS[args.target]
    devices = compile_devices(target, args.devices)
    work = plan(published(args.config), target, batch=args.batch, devices=devices if args.devices > 1 else ())
    out = console(args)
    programs = {}
    for name in work.programs:
        with out.status(f"compiling {name}"):
            programs[name] = measure(work, name, devices[0])
    each = f" on each of {args.devices}" if args.devices > 1 else ""
    out.print(_table(f"{args.config} for {target.name}, batch {args.batch}{each}", programs))
    for name, p in programs.items():
        for kind, shapes in p["collectives"].items():
            out.print(f"{name}: {kind} " + ", ".join(f"{n} x {shape}" for shape, n in shapes.items()))
    data = {"target": args.target, "config": args.config, "batch": args.batch, "devices": args.devices}
    data["programs"] = programs
    write_json(args, data)
    return 0


def _table(title: str, programs: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=title)
    for name in ("program", "graphs", "outside", "state copies", "state MB", "in place", "temp MB", "spills", "s"):
        table.add_column(name, justify="left" if name == "program" else "right")
    for name, p in programs.items():
        table.add_row(
            name,
            *(str(p[c]) for c in ("command_buffers", "outside", "state_copies")),
            f"{p['state_bytes'] / 1e6:,.1f}",
            "all" if p["alias_bytes"] == p["state_bytes"] else f"{p['alias_bytes'] / 1e6:,.1f}",
            f"{p['temp_bytes'] / 1e6:,.1f}",
            "?" if p["spills"] is None else str(p["spills"]),
            f"{p['compile_s']:.1f}",
        )
    return table
