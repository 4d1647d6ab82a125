"""`jaxoverlap bench WHAT`: what things cost, as ratios within one run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxoverlap.bench import compose, gpu, grammars, host, overlap
from jaxoverlap.cli import (
    UsageError,
    add_command,
    add_config_flags,
    add_json_flag,
    check_json_flag,
    console,
    read_config,
    write_json,
)
from jaxoverlap.config import EngineConfig
from jaxoverlap.loading import load, load_grammar_backend
from jaxoverlap.progress import bars

MOST_RANKS = 64
MOST_ROWS = 16384
MOST_WAITING = 1_000_000
MOST_STEP_MS = 10_000.0
MOST_SCALE = 1000.0
LEAST_LOAD, MOST_LOAD = 0.01, 1000.0  # a lower one is waited for in vain
MOST_RATIO = 100.0
LONGEST_COMPOSE = 100_000  # turns
FEWEST_TURNS = 4  # that give a median
ARRIVALS = 512  # in data/
SIMULATED = ("device", "step_ms", "prefill_step_ms", "step_jitter")
RANKS = ("dp_size", "enable_dp_attention", "load_balance_method", "dp_sync")


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "bench", "what things cost", lambda args: args.run_bench(args))
    benches = parser.add_subparsers(metavar="WHAT", required=True)

    bench = _add(benches, "host", "cost of a turn with a device that costs nothing, by part", run_host)
    bench.add_argument("--batch", type=counts, default=(1, 32, 256), metavar="N,N", help="decoding requests [1,32,256]")
    bench.add_argument("--waiting", type=count, default=0, metavar="N", help="requests that wait for a slot [0]")
    bench.add_argument("--turns", type=positive, default=1000, metavar="N", help="turns measured on each load [1000]")

    bench = _add(benches, "overlap", "normal loop against overlap loop on a simulated device", run_overlap)
    bench.add_argument("--step-ms", type=seconds, default=8.0, metavar="MS", help="step time of the device [8]")
    ratios = ",".join(map(str, overlap.RATIOS))
    bench.add_argument(
        "--ratios", type=floats, default=overlap.RATIOS, metavar="R,R", help=f"host work / step time [{ratios}]"
    )
    bench.add_argument("--turns", type=positive, default=120, metavar="N", help="turns of each loop and ratio [120]")

    bench = _add(
        benches, "dp", "the exchange of data-parallel ranks, and overlap with it, on simulated devices", run_dp
    )
    bench.add_argument("--ranks", type=counts, default=(2, 4), metavar="N,N", help="data-parallel ranks [2,4]")
    bench.add_argument("--step-ms", type=seconds, default=8.0, metavar="MS", help="step time of the devices [8]")
    bench.add_argument("--turns", type=positive, default=120, metavar="N", help="turns of each loop and case [120]")

    bench = _add(benches, "launch", "the call that gives the device a step, against a bare jitted call", run_launch)
    bench.add_argument("--batch", type=counts, default=(8,), metavar="N,N", help="decoding requests [8]")
    bench.add_argument("--turns", type=positive, default=100, metavar="N", help="launches measured [100]")
    add_config_flags(bench, leave_out=("disable_overlap_schedule", "max_running_requests", *SIMULATED, *RANKS))

    bench = _add(benches, "offline", "a model under real arrivals, and its decode step by hand", run_offline)
    bench.add_argument("--batch", type=counts, default=(1, 8), metavar="N,N", help="request slots [1,8]")
    bench.add_argument("--requests", type=positive, default=24, metavar="N", help="arrivals, at most 512 [24]")
    bench.add_argument("--scale", type=seconds, default=0.1, help="share of the recorded lengths [0.1]")
    bench.add_argument("--load", type=seconds, default=0.5, help="arrivals / what the slots can decode [0.5]")
    bench.add_argument("--turns", type=positive, default=32, metavar="N", help="decode steps a measured run [32]")
    bench.add_argument(
        "--grammar-share", type=shares, metavar="S,S", help="instead: what grammars cost, by share of the requests"
    )
    add_config_flags(bench, leave_out=("disable_overlap_schedule", "max_running_requests", *SIMULATED, *RANKS))

    bench = _add(benches, "compose", "composing a batch: long queues and large prefix trees", run_compose)
    bench.add_argument("--turns", type=positive, default=300, metavar="N", help="turns measured on each load [300]")
    bench.add_argument("--policy", choices=("fcfs", "lpm", "lof", "dfs-weight", "random"), default="fcfs")

    bench = _add(benches, "gpu", "kernels, decode steps and a load against the device's memory", gpu.run)
    bench.add_argument("--config", type=names, default=gpu.CONFIGS, metavar="NAME,NAME", help="sizes of the models")
    bench.add_argument("--batch", type=counts, default=(1, 8, 64, 256), metavar="N,N", help="decoding rows")
    bench.add_argument("--context", type=positive, default=1024, metavar="N", help="tokens in each row's cache")
    bench.add_argument("--turns", type=positive, default=100, metavar="N", help="calls measured of each kind")
    bench.add_argument("--copy-mb", type=positive, default=1024, metavar="N", help="MiB that the copy moves")
    bench.add_argument("--requests", type=positive, default=256, metavar="N", help="requests of the load")
    bench.add_argument("--shortest", type=positive, default=100, metavar="N", help="tokens in and out, at least")
    bench.add_argument("--longest", type=positive, default=1024, metavar="N", help="tokens in and out, at most")


def _add(benches: Any, name: str, about: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = benches.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(run_bench=run, parser=parser)
    add_json_flag(parser)
    return parser


def run_host(args: argparse.Namespace) -> int:
    check_json_flag(args)
    longest = (host.CONTEXT - host.PROMPT - host.WARM_UP - 64) // 2
    _at_least("--turns", host.SHORTEST_ROUND, args.turns)
    _at_most("--turns", longest, args.turns)
    _at_most("--batch", MOST_ROWS, *args.batch)
    _at_most("--waiting", MOST_WAITING, args.waiting)
    with bars() as report:
        figures = host.measure(args.batch, args.waiting, args.turns, report)
    host.show(console(args), figures)
    write_json(args, {"host": figures})
    return 0


def run_overlap(args: argparse.Namespace) -> int:
    check_json_flag(args)
    _check_simulated(args)
    _at_most("--ratios", MOST_RATIO, *args.ratios)
    with bars() as report:
        rows = overlap.measure(args.ratios, args.step_ms, args.turns, report)
    overlap.show(console(args), rows)
    write_json(args, {"overlap": rows})
    return 0


def run_dp(args: argparse.Namespace) -> int:
    check_json_flag(args)
    for ranks in args.ranks:
        if not 2 <= ranks <= MOST_RANKS:
            raise UsageError(f"--ranks must be 2 to {MOST_RANKS}, not {ranks}")
    _check_simulated(args)
    with bars() as report:
        from jaxoverlap.bench import dp

        rows = dp.measure(args.ranks, args.step_ms, args.turns, report)
    dp.show(console(args), rows)
    write_json(args, {"dp": rows})
    return 0


def run_launch(args: argparse.Namespace) -> int:
    check_json_flag(args)
    length = 32 + args.turns
    config = _model_config(args, length)
    with bars() as report:
        from jaxoverlap.bench import launch
        from jaxoverlap.device.runner import JaxRunner

        model, runner, _ = load(config, report)
        assert isinstance(runner, JaxRunner)
        figures = launch.measure(config, model, runner, args.batch, args.turns)
        runner.shutdown()
    launch.show(console(args), figures, config.model_path)
    write_json(args, {"launch": {"model": config.model_path, "batches": figures}})
    return 0


def run_offline(args: argparse.Namespace) -> int:
    check_json_flag(args)
    _at_most("--requests", ARRIVALS, args.requests)
    _at_most("--scale", MOST_SCALE, args.scale)
    _at_least("--load", LEAST_LOAD, args.load)
    _at_most("--load", MOST_LOAD, args.load)
    _at_least("--turns", FEWEST_TURNS, args.turns)
    if args.grammar_share is not None:
        return run_grammars(args)
    config = _model_config(args, max(256, 48 + args.turns))
    with bars() as report:
        from jaxoverlap.bench import offline
        from jaxoverlap.device.runner import JaxRunner

        model, runner, _ = load(config, report)
        assert isinstance(runner, JaxRunner)
        figures = offline.measure(
            config,
            model,
            runner,
            args.batch,
            requests=args.requests,
            scale=args.scale,
            load=args.load,
            steps=args.turns,
            report=report,
        )
        runner.shutdown()
    title = f"{config.model_path}: ms a decode step, then {args.requests} recorded arrivals, lengths x {args.scale:g}"
    offline.show(console(args), figures, title)
    write_json(args, {"offline": {"model": config.model_path, **figures}})
    return 0


def run_grammars(args: argparse.Namespace) -> int:
    """`bench offline --grammar-share`."""
    config = _model_config(args, grammars.PROMPT + args.turns + 16, grammar_backend="llguidance")
    with bars() as report:
        model, runner, _ = load(config, report)
        backend = load_grammar_backend(config, model)
        if backend is None:
            raise UsageError(f"--grammar-share needs grammar_backend llguidance and a tokenizer ({model.name})")
        rows = grammars.measure(config, model, runner, backend, args.grammar_share, args.batch, args.turns, report)
        backend.shutdown()
        runner.shutdown()
    title = f"{config.model_path}: ms a decode step; mask, idle: filling masks late, and the device waiting for it"
    grammars.show(console(args), rows, title)
    write_json(args, {"offline": {"model": config.model_path, "grammars": rows}})
    return 0 if all(row["tokens_equal"] for row in rows) else 1


def _model_config(args: argparse.Namespace, length: int, grammar_backend: str = "none") -> EngineConfig:
    """For `args.batch` and requests of up to `length` tokens."""
    batch = max(args.batch)
    _at_most("--batch", MOST_ROWS, batch)
    config = read_config(args, max_running_requests=batch, context_length=length, grammar_backend=grammar_backend)
    page = config.page_size
    if config.device == "simulated":
        raise UsageError("this needs a model: JAXOVERLAP_DEVICE must not be simulated")
    if config.dp_size > 1:
        raise UsageError("this measures one rank: JAXOVERLAP_DP_SIZE must be 1; bench dp measures several")
    if config.max_running_requests < batch:
        raise UsageError(f"--batch must be at most max_running_requests {config.max_running_requests}, not {batch}")
    if (config.context_length or length) < length:
        raise UsageError(f"context_length must be at least {length}, not {config.context_length}")
    total = batch * -(-length // page) * page
    if config.max_total_tokens is None:
        config = dataclasses.replace(config, max_total_tokens=total)
    least = batch * -(-(32 + args.turns) // page) * page  # so that all decode at once
    if config.max_total_tokens < least:
        raise UsageError(f"max_total_tokens must be at least {least}, not {config.max_total_tokens}")
    return config


def _check_simulated(args: argparse.Namespace) -> None:
    _at_least("--turns", FEWEST_TURNS, args.turns)
    _at_most("--turns", host.CONTEXT // 2, args.turns)
    _at_most("--step-ms", MOST_STEP_MS, args.step_ms)


def _at_least(flag: str, least: float, value: float) -> None:
    if value < least:
        raise UsageError(f"{flag} must be at least {least}, not {value}")


def _at_most(flag: str, most: float, *values: float) -> None:
    for value in values:
        if value > most:
            raise UsageError(f"{flag} must be at most {most}, not {value}")


def run_compose(args: argparse.Namespace) -> int:
    check_json_flag(args)
    _at_least("--turns", FEWEST_TURNS, args.turns)
    _at_most("--turns", LONGEST_COMPOSE, args.turns)
    rows = compose.measure(args.policy, args.turns)
    compose.show(console(args), rows, args.policy)
    write_json(args, {"compose": rows})
    return 0


def names(text: str) -> tuple[str, ...]:
    from jaxoverlap.models.shapes import SHAPES, published

    dense = [
        name for name in SHAPES if published(name).moe is None
    ]  # the rows timed would all choose one set of experts
    given = tuple(text.split(","))
    for name in given:
        if name not in dense:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(dense)}")
    return given


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be an int of at least 0")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an int of at least 1")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 0 to 1")
    return values


def seconds(text: str) -> float:
    """A time above 0, in whatever unit the flag has."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def floats(text: str) -> tuple[float, ...]:
    return tuple(seconds(part) for part in text.split(","))
