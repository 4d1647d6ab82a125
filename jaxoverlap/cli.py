"""The command line: `jaxoverlap COMMAND`. Imports no jax.

A command is a module with `register(subparsers)`, which adds a parser and sets its `run`, a function from the parsed
arguments to an exit code: 0 done, 1 failed (for `compare` also: tokens differ), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import io
import json
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxoverlap.config import EngineConfig, parse
from jaxoverlap.core import RequestError

COMMANDS = (
    "jaxoverlap.commands.fetch",
    "jaxoverlap.commands.checkpoint",
    "jaxoverlap.commands.generate",
    "jaxoverlap.compare.command",
    "jaxoverlap.replay.command",
    "jaxoverlap.aot.command",
    "jaxoverlap.bench.command",
    "jaxoverlap.commands.env",
)


class UsageError(ValueError):
    """Something wrong with the arguments that argparse could not see."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a user's mistake is one line on stderr, not a traceback."""
    _prepare_streams()
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        EngineConfig.check_environment()
    except ValueError as e:
        return _failed(f"{args.parser.prog}: error: {e}", 2)
    try:
        return args.run(args)
    except UsageError as e:
        args.parser.print_usage(sys.stderr)
        return _failed(f"{args.parser.prog}: error: {e}", 2)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 1
    except _expected_errors() as e:
        return _failed(f"{args.parser.prog}: error: {e}", 1)


def _prepare_streams() -> None:
    """A closed stdout swallows what is printed; a character that the terminal does not have becomes a `?`."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def make_parser() -> argparse.ArgumentParser:
    about = "SGLang's overlap scheduler, in JAX."
    parser = argparse.ArgumentParser(prog="jaxoverlap", description=about, allow_abbrev=False)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(name).register(subparsers)
    return parser


def add_command(subparsers: Any, name: str, about: str, run: Callable[[argparse.Namespace], int]) -> Any:
    """A parser for the command; what it parses is handed to `run`."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = subparsers.add_parser(name, help=about, description=about, allow_abbrev=False, formatter_class=formatter)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_config_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """A flag for each setting of EngineConfig; a flag that is not given leaves it to the environment."""
    group = parser.add_argument_group("engine", "settings, also read from JAXOVERLAP_<SETTING>")
    hints = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if not field.metadata["flag"] or field.name in leave_out:
            continue
        names = [f"--{field.name.replace('_', '-')}", *(["--model"] if field.name == "model_path" else [])]
        about = field.metadata["about"].replace("%", "%%")
        if not about.endswith("]"):  # else it says itself what stands for None
            about += f" [{field.default}]"
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": about, "dest": f"setting_{field.name}"}
        if hints[field.name] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        else:
            group.add_argument(*names, type=_typed(hints[field.name]), metavar="VALUE", **options)


def read_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The flags over the environment over `defaults`. Raises UsageError."""
    given = {k.removeprefix("setting_"): v for k, v in vars(args).items() if k.startswith("setting_")}
    try:
        return EngineConfig.from_sources(given, defaults=defaults)
    except ValueError as e:
        raise UsageError(str(e)) from None


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    about = "write all figures as JSON; -: to stdout, and nothing else there"
    parser.add_argument("--json", metavar="FILE", default=argparse.SUPPRESS, help=about)


def check_json_flag(args: argparse.Namespace) -> None:
    """Raises UsageError, before anything is measured, for a file that could not be written."""
    path = getattr(args, "json", "-")
    if path != "-":
        check_output_file("--json", path)


def check_output_file(flag: str, path: str) -> None:
    """Raises UsageError for a path that cannot be written as a file; leaves none behind."""
    file = Path(path)
    try:
        if not path or file.is_dir():
            raise UsageError(f"{flag}: {path!r} is no file name")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"{flag}: folder {str(file.parent)!r} does not exist")
        is_new = not file.exists()
        if is_new or file.is_file():  # a pipe's reader would take the closing for the end
            with file.open("a"):
                pass
        if is_new:
            file.unlink()
    except OSError as e:
        raise UsageError(f"{flag}: {path!r} cannot be written: {e.strerror}") from None


def write_json(args: argparse.Namespace, data: Any) -> None:
    """To the file of --json, if given."""
    path = getattr(args, "json", None)
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    elif path is not None:
        Path(path).write_text(text)


def console(args: argparse.Namespace) -> Console:
    """Where tables go: stdout, or stderr when stdout is for JSON."""
    out = Console(stderr=getattr(args, "json", None) == "-")
    return out if out.is_terminal else Console(stderr=out.stderr, width=100)


def _typed(hint: Any) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text, hint)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return convert


def _failed(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def _expected_errors() -> tuple[type[Exception], ...]:
    from jaxoverlap.checkpoint.errors import CheckpointError, FetchError
    from jaxoverlap.engine import EngineError

    return (RequestError, CheckpointError, FetchError, EngineError, OSError, ImportError, ValueError)
