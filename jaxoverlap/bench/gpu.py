"""`jaxoverlap bench gpu`: kernels, decode steps and a whole load against what the device's memory can move."""

from __future__ import annotations

import argparse
import os
from typing import Any

from jaxoverlap.cli import check_json_flag, console, write_json
from jaxoverlap.paths import cache_dir
from jaxoverlap.progress import bars

CONFIGS = ("qwen3-0.6b", "qwen3-8b")


def measure(args: argparse.Namespace, report: Any) -> dict[str, Any]:
    """All figures; times in seconds, rates a second."""
    import jax

    from jaxoverlap.bench import gpu_measure as m
    from jaxoverlap.device import advice
    from jaxoverlap.device.compile_cache import enable_compilation_cache
    from jaxoverlap.models.shapes import published

    advice.warn(os.environ)
    enable_compilation_cache(cache_dir() / "compiled")
    device = jax.devices()[0]
    report("copy", 0, 1)
    bandwidth = m.copy_bandwidth(args.copy_mb << 20, args.turns)
    out: dict[str, Any] = {"device": device.device_kind, "platform": device.platform, "bytes_per_second": bandwidth}
    out["models"] = {}
    for i, name in enumerate(args.config):
        report(name, i, len(args.config))
        config = published(name)
        model = m.random_model(config)
        steps = m.decode_times(model, args.batch, args.context, args.turns)
        for step in steps:
            step["roofline_seconds"] = (step["weight_bytes"] + step["kv_bytes"]) / bandwidth
            step["of_roofline"] = step["roofline_seconds"] / step["seconds"]
        kernels = m.kernel_times(config, max(args.batch), args.context, args.turns)
        for kernel in kernels:
            kernel["of_copy"] = kernel["bytes_per_second"] / bandwidth
        slots = max(args.batch)
        loads = m.loads(model, args.requests, (args.shortest, args.longest), slots, args.turns)
        out["models"][name] = {"kernels": kernels, "decode": steps, "load": loads, "context": args.context}
    report("done", len(args.config), len(args.config))
    return out


def run(args: argparse.Namespace) -> int:
    check_json_flag(args)
    if args.shortest > args.longest:
        args.parser.error(f"--shortest {args.shortest} is above --longest {args.longest}")
    with bars() as report:
        figures = measure(args, report)
    console(args).print(markdown(figures), markup=False, highlight=False, soft_wrap=True)
    write_json(args, {"gpu": figures})
    return 0


def markdown(figures: dict[str, Any]) -> str:
    lines = [f"{figures['device']}: copy {figures['bytes_per_second'] / 1e9:,.0f} GB/s", ""]
    for name, model in figures["models"].items():
        context = model["context"]
        lines += _table(
            f"{name}: kernels, {context} tokens of context",
            ("kernel", "us", "GB/s", "of copy"),
            [
                (
                    k["kernel"],
                    f"{k['seconds'] * 1e6:,.1f}",
                    f"{k['bytes_per_second'] / 1e9:,.1f}",
                    f"{k['of_copy']:.0%}",
                )
                for k in model["kernels"]
            ],
        )
        lines += _table(
            f"{name}: decode step, {context} tokens of context",
            ("batch", "ms", "roofline ms", "of roofline"),
            [
                (
                    f"{s['batch']}",
                    f"{s['seconds'] * 1e3:,.3f}",
                    f"{s['roofline_seconds'] * 1e3:,.3f}",
                    f"{s['of_roofline']:.0%}",
                )
                for s in model["decode"]
            ],
        )
        alone = model["decode"][-1]["seconds"]
        lines += _table(
            f"{name}: engine; gap: a steady step of the largest batch, less its decode step above (of longer rows)",
            ("loop", "tokens/s", "steady step ms", "gap ms"),
            [
                (
                    w["loop"],
                    f"{w['tokens'] / w['seconds']:,.0f}",
                    f"{w['steady_step_seconds'] * 1e3:,.3f}",
                    f"{(w['steady_step_seconds'] - alone) * 1e3:,.3f}",
                )
                for w in model["load"]
            ],
        )
    return "\n".join(lines)


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in (head, rule, *rows)), ""]
