"""`jaxoverlap checkpoint convert`: a model directory in the other format."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from jaxoverlap.cli import add_command
from jaxoverlap.progress import bars


def register(subparsers: Any) -> None:
    about = "convert model directories between Hugging Face (safetensors) and Orbax"
    parser = add_command(subparsers, "checkpoint", about, run)
    parser.add_argument("action", choices=["convert"], help="what to do")
    parser.add_argument("source", metavar="SRC", help="a model directory of either format, or a demo model")
    parser.add_argument("destination", metavar="DST", help="the new directory; a checkpoint there is replaced")


def run(args: argparse.Namespace) -> int:
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"  # no accelerator is needed, nor kept from others
    from jaxoverlap.checkpoint.convert import convert
    from jaxoverlap.models import registry
    from jaxoverlap.models.decoder import IGNORED_TENSORS

    with bars() as report:
        source = registry.directory_of(args.source, progress=report)
        tree = registry.parameter_tree(source)
        convert(source, Path(args.destination), tree, ignored=IGNORED_TENSORS, progress=report)
    print(args.destination)
    return 0
