"""`jaxoverlap generate`: text from prompts, streamed as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from jaxoverlap.cli import (
    UsageError,
    add_command,
    add_config_flags,
    add_json_flag,
    check_json_flag,
    read_config,
    write_json,
)
from jaxoverlap.core import RequestError
from jaxoverlap.engine import Engine
from jaxoverlap.progress import bars
from jaxoverlap.sampling_params import SamplingParams


def register(subparsers: Any) -> None:
    parser = add_command(subparsers, "generate", "generate text", run)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    prompts.add_argument("--input-ids", action="append", type=ids, metavar="1,2,3", help="a prompt as token ids")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    add_sampling_flags(parser)
    add_json_flag(parser)
    add_config_flags(parser)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=128, help="longest completion")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    group.add_argument("--top-p", type=float, default=1.0, help="probability mass kept")
    group.add_argument("--top-k", type=int, default=-1, help="ids kept; -1: all")
    group.add_argument("--min-p", type=float, default=0.0, help="least probability, relative to the best id's")
    group.add_argument("--stop", action="append", help="a stop string; may be given several times")
    group.add_argument("--stop-regex", action="append", help="a regular expression to stop at; several times as well")
    group.add_argument("--n", type=int, default=1, help="completions of each prompt")
    group.add_argument("--sampling-seed", type=int, help="fixes the noise of every prompt")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the end-of-sequence token")
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", type=json_schema, metavar="FILE", help="JSON of this schema: a file, or text")
    grammar.add_argument("--regex", help="text that this regular expression matches as a whole")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Raises UsageError."""
    names = ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_regex", "n", "sampling_seed"]
    names += ["json_schema", "regex"]
    try:
        return SamplingParams(ignore_eos=args.ignore_eos, **{name: getattr(args, name) for name in names})
    except ValueError as e:
        raise UsageError(str(e)) from None


def json_schema(text: str) -> str:
    """A schema's text: `text` itself where it is an object, else the file's."""
    if text.lstrip().startswith("{"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a JSON object nor a readable file: {e}") from None


def ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ints such as 1,2,3") from None


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    grammars = "none" if params.grammar_key is None else "llguidance"  # none: half as many programs to compile
    slots = min(16, params.n * len(args.prompt or args.input_ids))
    config = read_config(args, max_running_requests=slots, grammar_backend=grammars)
    check_json_flag(args)
    if args.chat and args.prompt is None:
        raise UsageError("--chat needs --prompt")
    with bars() as report:
        engine = Engine.from_config(config, progress=report)
    with engine:
        results, wall = _generate(engine, args, params)
    tokens = sum(r["meta_info"]["completion_tokens"] for r in results)
    write_json(args, {"results": results, "wall_s": wall, "output_tokens": tokens, "tokens_per_s": tokens / wall})
    return 0


def _generate(engine: Engine, args: argparse.Namespace, params: SamplingParams) -> tuple[list[dict[str, Any]], float]:
    given = _prompts(engine, args)
    begin = time.perf_counter()
    quiet = getattr(args, "json", None) == "-"
    if len(given) == params.n == 1:
        results = [_stream(engine, given[0], params, quiet)]
    else:
        results = engine.generate(input_ids=given, sampling_params=params)
    wall = time.perf_counter() - begin
    for i, result in enumerate(results):
        reason = result["meta_info"]["finish_reason"]
        if reason.get("status_code") == 400:
            raise RequestError(f"prompt {i // params.n}: {reason['message']}")
        if len(results) > 1 and not quiet:
            print(f"--- {i}\n{_text(result)}")
    return results, wall


def _prompts(engine: Engine, args: argparse.Namespace) -> list[list[int]]:
    if args.input_ids is not None:
        return args.input_ids
    if engine.tokenizer is None:
        raise UsageError(f"--prompt needs a tokenizer and {engine.model.name} has none; use --input-ids")
    if not args.chat:
        return [engine.tokenizer.encode(prompt) for prompt in args.prompt]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in args.prompt]


def _stream(engine: Engine, prompt: list[int], params: SamplingParams, quiet: bool) -> dict[str, Any]:
    shown = 0
    result: dict[str, Any] = {}
    for result in engine.generate(input_ids=prompt, sampling_params=params, stream=True):
        if not quiet:
            text = _text(result)
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
    if not quiet:
        sys.stdout.write("\n")
    return result


def _text(result: dict[str, Any]) -> str:
    return result["text"] if "text" in result else " ".join(map(str, result["output_ids"]))
