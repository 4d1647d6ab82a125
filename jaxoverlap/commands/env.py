"""`jaxoverlap env`: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

from jaxoverlap.cli import (
    add_command,
    add_config_flags,
    add_json_flag,
    check_json_flag,
    console,
    read_config,
    write_json,
)
from jaxoverlap.config import EngineConfig
from jaxoverlap.paths import cache_dir

PACKAGES = (
    *("jaxoverlap", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"),
    *("safetensors", "orbax-checkpoint", "tokenizers"),
)


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "env", "versions, devices, kernels and shapes", run)
    add_json_flag(parser)
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    check_json_flag(args)
    data = describe(config)
    out = console(args)
    for name, value in data.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        out.print(f"{name:20} {text}", markup=False, highlight=False, soft_wrap=True)
    write_json(args, data)
    return 0


def describe(config: EngineConfig) -> dict[str, Any]:
    """Versions, devices, the implementation chosen for each kernel, and the buckets that `config` gives (for the
    model's context where context_length is not set: as if it were long)."""
    import jax

    from jaxoverlap.device import advice
    from jaxoverlap.device.buckets import Buckets
    from jaxoverlap.kernels.backend import AUTO, choose

    devices = jax.devices()
    unlimited = 1 << 30
    context, total = config.context_length or unlimited, config.max_total_tokens or unlimited
    buckets = Buckets.of(config, context_length=context, max_total_tokens=total)
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
        "kernels": {op: choose(op, config.kernels, devices[0].platform) for op in AUTO},
        "decode_buckets": [b.rows for b in buckets.decode],
        "extend_buckets": [b.tokens for b in buckets.extend],
        "cache": str(cache_dir()),
        "advice": advice.advice(os.environ),
    }
