"""`jaxoverlap fetch`: the demo model into the cache."""

from __future__ import annotations

import argparse
from typing import Any

from jaxoverlap.cli import add_command
from jaxoverlap.progress import bars


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "fetch", "fetch a demo model into the cache", run)
    parser.add_argument("name", nargs="?", default="smollm2-135m", help="the model")


def run(args: argparse.Namespace) -> int:
    from jaxoverlap.checkpoint.fetch import fetch

    with bars() as report:
        path = fetch(args.name, progress=report)
    print(path)
    return 0
