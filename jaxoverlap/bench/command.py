"""`jaxoverlap bench WHAT`: what things cost, as ratios within one run."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from jaxoverlap.cli import add_command, add_json_flag, check_json_flag, console, write_json


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "bench", "what a turn costs", lambda args: args.run_bench(args))
    benches = parser.add_subparsers(metavar="WHAT", required=True)
    compose = benches.add_parser("compose", help="composing a batch: long queues and large prefix trees")
    compose.add_argument("--turns", type=int, default=300, help="turns measured on each load [300]")
    compose.add_argument("--policy", choices=("fcfs", "lpm", "lof", "dfs-weight", "random"), default="fcfs")
    compose.set_defaults(run_bench=run_compose)
    add_json_flag(compose)


def run_compose(args: argparse.Namespace) -> int:
    from jaxoverlap.bench.compose import measure

    check_json_flag(args)
    rows = measure(args.policy, args.turns)
    table = Table(title=f"composing a batch, policy {args.policy}: median from the start of the turn to its launch")
    for name in ("waiting", "cached tokens", "admitting", "ratio", "decode only", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        row |= {f"{k}_ratio": row[f"{k}_us"] / rows[0][f"{k}_us"] for k in ("admit", "decode")}
        table.add_row(
            f"{row['waiting']:,}",
            f"{row['cached_tokens']:,}",
            f"{row['admit_us']:.0f} us",
            f"{row['admit_ratio']:.2f}",
            f"{row['decode_us']:.0f} us",
            f"{row['decode_ratio']:.2f}",
        )
    console(args).print(table)
    write_json(args, {"compose": rows})
    return 0
