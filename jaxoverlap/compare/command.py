"""`jaxoverlap compare`: the normal loop and the overlap loop on the same requests, in JAX or side by side with PyTorch
and SGLang."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

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
from jaxoverlap.compare import against_sglang, runners
from jaxoverlap.compare.measure import Comparison, all_loops, compare
from jaxoverlap.compare.report import TIMELINE_STEPS, agrees, figures, show
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.progress import bars
from jaxoverlap.trace.export import check_timeline_path, write_timeline
from jaxoverlap.trace.timeline import window

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "Give me three tips for a good night's sleep.",
    "Explain what a prime number is.",
    "Tell me a story about a brave mouse.",
    "How do plants make food?",
    "What should I pack for a hike?",
)
DRAFT_LAYERS = {"auto": 25, "smollm2-135m": 25}  # of 30: about 4 drafts of 10 count
RANDOM_LENGTHS = (8, 64)  # of prompts for a model without a tokenizer


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "compare", "normal loop and overlap loop on the same requests", run)
    group = parser.add_argument_group("load")
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given several times [8 questions]")
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help='prompts: .jsonl with "prompt" or "question", or lines'
    )
    prompts.add_argument("--prompt-len", type=_positive, metavar="N", help="prompts of N random tokens")
    group.add_argument("--no-chat", action="store_true", help="do not put prompts into the model's chat template")
    group.add_argument("--batch", type=_positive, help="requests, all submitted at once; prompts repeat [the prompts]")
    group.add_argument("--max-new-tokens", type=_positive, default=32, help="longest completion")
    group.add_argument("--ignore-eos", action="store_true", help="every completion is that long")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    group.add_argument("--repeats", type=_positive, default=3, help="measured runs of each loop")
    parser.add_argument(
        "--runner",
        choices=runners.CHOICES,
        metavar="RUNNERS",
        default="jax",
        help="jax, or jax,torch: both loops in PyTorch as well",
    )
    parser.add_argument(
        "--against-sglang", action="store_true", help="also SGLang, overlap off and on, where it is installed"
    )
    parser.add_argument(
        "--speculative",
        choices=("ngram", "draft"),
        help="also with speculation; draft: a model or layers, see the settings [25 of SmolLM2's 30 layers]",
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="also draw FILE.png, or write FILE.json for Perfetto"
    )
    add_json_flag(parser)
    add_config_flags(parser, leave_out=("disable_overlap_schedule", "speculative_algorithm"))


def run(args: argparse.Namespace) -> int:
    texts = read_prompts(args.prompts) if args.prompts is not None else args.prompt
    batch = args.batch or len(texts or QUESTIONS)
    speculating = None
    if args.speculative is not None:
        speculating, config = _with_and_without(args, max_running_requests=min(batch, 16), grammar_backend="none")
    else:
        config = read_config(args, max_running_requests=min(batch, 16), grammar_backend="none")
    if config.disable_overlap_schedule:
        raise UsageError("compare runs both loops: JAXOVERLAP_DISABLE_OVERLAP_SCHEDULE must not be set")
    if args.temperature < 0:
        raise UsageError(f"--temperature must be at least 0, not {args.temperature}")
    check_json_flag(args)
    if args.timeline is not None:
        try:
            check_timeline_path(args.timeline)
        except ValueError as e:
            raise UsageError(f"--timeline: {e}") from None
    params = {"max_new_tokens": args.max_new_tokens, "ignore_eos": args.ignore_eos, "temperature": args.temperature}
    params |= {"sampling_seed": 0}
    names = args.runner.split(",")
    runners.check(names, config)
    if args.against_sglang:
        against_sglang.check(config)
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(bars())
        bases = {"jax": stack.enter_context(Engine.from_config(config, progress=report))}
        if "torch" in names:
            bases["torch"] = stack.enter_context(runners.torch_engine(bases["jax"], report))
        prompts = _prompts(bases["jax"], args, texts, batch)
        comparison = compare(all_loops(bases), prompts, params, args.repeats, report)
        device = " / ".join(engine.device_name for engine in bases.values())
        data = {"model": config.model_path, "device": device, **figures(comparison)}
        data["notes"] = runners.notes(list(bases.values()))
        data["largest_margin"] = runners.largest_margin(bases, comparison, params)
    if args.against_sglang:
        data["sglang"] = against_sglang.measure(config, comparison, params, args.repeats)
    show(console(args), comparison, data)
    if speculating is not None:
        data["speculative"] = _speculate(speculating, args, prompts, params, comparison, data)
    _write_timeline(args.timeline, comparison)
    write_json(args, data)
    return 0 if agrees(data) else 1


def _with_and_without(args: argparse.Namespace, **defaults: Any) -> tuple[EngineConfig, EngineConfig]:
    """The configurations with the drafts that --speculative asks for, and without any."""
    args.setting_speculative_algorithm = "NGRAM" if args.speculative == "ngram" else "STANDALONE"
    flags = vars(args)
    given = {"setting_speculative_draft_model_path", "setting_speculative_draft_layers"} & set(flags)
    if args.speculative == "draft" and not given and flags.get("setting_model_path", "auto") in DRAFT_LAYERS:
        args.setting_speculative_draft_layers = DRAFT_LAYERS[flags.get("setting_model_path", "auto")]
    config = read_config(args, **defaults)
    fields: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(config) if f.name.startswith("speculative_")
    }
    return config, dataclasses.replace(config, **fields)


def _speculate(
    config: EngineConfig,
    args: argparse.Namespace,
    prompts: list[list[int]],
    params: dict[str, Any],
    plain: Comparison,
    data: dict[str, Any],
) -> dict[str, Any]:
    """Runs and shows the same with speculation. `plain` and `data` are those without."""
    with bars() as report, Engine.from_config(config, progress=report) as base:
        comparison = compare(all_loops({"jax": base}), prompts, params, args.repeats, report)
    same = comparison.runs["normal"][0].output_ids == plain.runs["normal"][0].output_ids
    out = {"drafts": args.speculative, "same_tokens": same, **figures(comparison)}
    show(console(args), comparison, {**data, **out, "model": f"{config.model_path} with {args.speculative} drafts"})
    text = "the same tokens as without speculation" if same else "OTHER tokens than without speculation"
    console(args).print(text, style="bold green" if same else "bold red")
    return out


def read_prompts(path: Path) -> list[str]:
    """Raises UsageError naming the file and the line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--prompts: {path}: {e}") from None
    if not lines:
        raise UsageError(f"--prompts: {path} holds no prompt")
    return [_parse(path, i, line) for i, line in enumerate(lines, 1)] if path.suffix == ".jsonl" else lines


def _parse(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise UsageError(f"--prompts: {path}, line {number}: {e}") from None
    found = [entry[k] for k in ("prompt", "question") if k in entry] if isinstance(entry, dict) else [entry]
    if not found or not isinstance(found[0], str):
        raise UsageError(
            f'--prompts: {path}, line {number}: neither a string nor an object with "prompt" or "question"'
        )
    return found[0]


def _prompts(engine: Engine, args: argparse.Namespace, texts: list[str] | None, batch: int) -> list[list[int]]:
    tokenizer = engine.tokenizer
    if tokenizer is None and texts is not None:
        raise UsageError(f"{engine.config.model_path} has no tokenizer: use --prompt-len")
    if args.prompt_len is not None or tokenizer is None:
        rng = np.random.default_rng(0)
        low, high = (args.prompt_len, args.prompt_len + 1) if args.prompt_len is not None else RANDOM_LENGTHS
        vocabulary = engine.model.config.vocab_size
        return [rng.integers(3, vocabulary, rng.integers(low, high)).tolist() for _ in range(batch)]
    chosen = texts or QUESTIONS
    chosen = [chosen[i % len(chosen)] for i in range(batch)]
    if args.no_chat or tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in chosen]
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in chosen]


def _write_timeline(path: Path | None, comparison: Comparison) -> None:
    if path is not None:
        traces = {name: runs[-1].trace for name, runs in comparison.runs.items()}
        write_timeline(path, traces, {name: window(trace, TIMELINE_STEPS) for name, trace in traces.items()})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an int of at least 1")
    return int(text)
