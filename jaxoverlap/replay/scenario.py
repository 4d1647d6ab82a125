"""A scenario file: settings, what arrives when, forced tokens. The format is tests/conformance/README.md's."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxoverlap.config import EngineConfig
from jaxoverlap.sampling_params import SamplingParams

CONTEXT_LENGTH = 4096
VOCAB_SIZE = 1000
EOS = 2
SAME_NAME = {
    "chunked_prefill_size",
    "disable_consecutive_prefill_overlap",
    "disable_priority_preemption",
    "disable_radix_cache",
    "dp_size",
    "enable_mixed_chunk",
    "enable_priority_scheduling",
    "init_new_token_ratio",
    "max_prefill_tokens",
    "max_running_requests",
    "max_total_tokens",
    "page_size",
    "priority_scheduling_preemption_threshold",
    "retract_decode_steps",
    "schedule_conservativeness",
    "schedule_low_priority_values_first",
    "schedule_policy",
    "stream_interval",
}
SPECULATIVE = {
    "num_steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
}


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < VOCAB_SIZE


class Kind(NamedTuple):
    """What a field may hold."""

    about: str
    allows: Callable[[Any], bool]


COUNT = Kind("an integer of at least 0", lambda v: type(v) is int and v >= 0)
INTEGER = Kind("an integer", lambda v: type(v) is int)
BOOLEAN = Kind("true or false", lambda v: type(v) is bool)
STRING = Kind("a string", lambda v: isinstance(v, str))
NAME = Kind("a non-empty string", lambda v: isinstance(v, str) and v != "")
OBJECT = Kind("an object", lambda v: isinstance(v, dict))
LIST = Kind("a list", lambda v: isinstance(v, list))
PROMPT = Kind(
    f"a non-empty list of tokens below {VOCAB_SIZE}",
    lambda v: isinstance(v, list) and len(v) > 0 and all(map(_is_token, v)),
)
FORCED = Kind(
    f"an object from output indices below {CONTEXT_LENGTH} to tokens below {VOCAB_SIZE}",
    lambda v: (
        isinstance(v, dict) and all(i.isdecimal() and int(i) < CONTEXT_LENGTH and _is_token(t) for i, t in v.items())
    ),
)
STOPS = Kind("a stop", lambda v: True)  # SamplingParams says more
MODE = Kind("in_place, retract or abort", lambda v: v in ("in_place", "retract", "abort"))

SCENARIO = {
    "name": NAME,
    "about": STRING,
    "config": OBJECT,
    "ops": LIST,
    "force": OBJECT,
    "grammar_compile_turns": COUNT,
    "idle_tail": COUNT,
    "max_turns": COUNT,
}
AT = {"op": STRING, "at": COUNT}
OPERATIONS = {
    "request": AT
    | {
        "rid": NAME,
        "prompt_ids": PROMPT,
        "max_new_tokens": COUNT,
        "ignore_eos": BOOLEAN,
        "stop_token_ids": STOPS,
        "stop": STOPS,
        "grammar": COUNT,
        "return_logprob": BOOLEAN,
        "priority": INTEGER,
        "rank": COUNT,
    },
    "abort": AT | {"rid": STRING, "all": BOOLEAN},
    "pause": AT | {"mode": MODE},
    "continue": AT,
}
REQUIRED = {"request": ("at", "rid", "prompt_ids", "max_new_tokens"), "pause": ("at", "mode")}


class ScenarioError(ValueError):
    """The file is no scenario; the message names the file and the field."""


@dataclass(frozen=True)
class Scenario:
    name: str
    config: dict[str, Any]  # EngineConfig fields, but for the loop
    ops: list[dict[str, Any]]
    force: dict[str, dict[int, int]] = field(default_factory=dict)  # rid: {index of the output token: token}
    grammar_compile_turns: int = 0
    idle_tail: int = 2
    max_turns: int = 60
    about: str = ""

    def engine_config(self, overlap: bool, **more: Any) -> EngineConfig:
        settings = {**self.config, "enable_dp_attention": self.config.get("dp_size", 1) > 1, **more}
        return EngineConfig(model_path="checksum", disable_overlap_schedule=not overlap, **settings)


def load_scenario(path: str | Path) -> Scenario:
    """Reads `scenario` and nothing else of a file. Raises ScenarioError."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as e:
        raise ScenarioError(f"{path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise ScenarioError(f"{path}: not JSON: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("scenario"), dict):
        raise ScenarioError(f"{path}: no object 'scenario' in it")
    try:
        return parse_scenario(data["scenario"])
    except ValueError as e:
        raise ScenarioError(f"{path}: {e}") from None


def parse_scenario(raw: dict[str, Any]) -> Scenario:
    """Raises ValueError naming the field and what it must be."""
    _check_fields("scenario", raw, SCENARIO, required=("name", "config", "ops"))
    scenario = Scenario(
        name=raw["name"],
        config=_parse_config(raw["config"]),
        ops=raw["ops"],
        force=_parse_force(raw.get("force", {})),
        grammar_compile_turns=raw.get("grammar_compile_turns", 0),
        idle_tail=raw.get("idle_tail", 2),
        max_turns=raw.get("max_turns", 60),
        about=raw.get("about", ""),
    )
    try:
        config = scenario.engine_config(overlap=True)
    except ValueError as e:
        raise ValueError(f"config: {e}") from None
    rids: set[str] = set()
    for i, op in enumerate(scenario.ops):
        _check_op(f"ops[{i}]", op, config)
        if op["op"] == "request" and op["rid"] in rids:
            raise ValueError(f"ops[{i}].rid: {op['rid']!r} is taken")
        rids.add(op.get("rid", ""))
    return scenario


def _parse_config(raw: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, value in raw.items():
        if name == "speculative":
            _check_fields("config.speculative", value, dict.fromkeys(SPECULATIVE, COUNT), required=tuple(SPECULATIVE))
            config |= {SPECULATIVE[key]: number for key, number in value.items()}
            config["speculative_algorithm"] = "EAGLE"
        elif name in SAME_NAME:
            config[name] = value
        else:
            raise ValueError(f"config: unknown setting {name!r}")
    if config.get("max_total_tokens") is None:
        raise ValueError("config.max_total_tokens: missing")
    return config


def _parse_force(raw: dict[str, Any]) -> dict[str, dict[int, int]]:
    _check_fields("force", raw, dict.fromkeys(raw, FORCED), required=())
    return {rid: {int(i): token for i, token in tokens.items()} for rid, tokens in raw.items()}


def _check_op(where: str, op: Any, config: EngineConfig) -> None:
    if not isinstance(op, dict) or str(op.get("op")) not in OPERATIONS:
        raise ValueError(f"{where}.op: must be one of {', '.join(OPERATIONS)}")
    _check_fields(where, op, OPERATIONS[op["op"]], REQUIRED.get(op["op"], ("at",)))
    if op["op"] == "abort" and ("rid" in op) == op.get("all", False):
        raise ValueError(f"{where}: an abort has either rid or all")
    if op["op"] != "request":
        return
    try:
        SamplingParams(op["max_new_tokens"], stop=op.get("stop"), stop_token_ids=op.get("stop_token_ids"))
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None
    assert config.max_total_tokens is not None
    longest = min(CONTEXT_LENGTH, config.max_total_tokens) - 7
    if len(op["prompt_ids"]) > longest:
        raise ValueError(f"{where}.prompt_ids: {len(op['prompt_ids'])} tokens, but at most {longest} are admitted")
    if op.get("rank", 0) >= config.dp_size:
        raise ValueError(f"{where}.rank: must be below dp_size {config.dp_size}, not {op['rank']}")


def _check_fields(where: str, raw: Any, known: dict[str, Kind], required: tuple[str, ...]) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: must be an object")
    for name, value in raw.items():
        if name not in known:
            raise ValueError(f"{where}: unknown field {name!r}")
        if not known[name].allows(value):
            raise ValueError(f"{where}.{name}: must be {known[name].about}, not {reprlib.repr(value)}")
    for name in required:
        if name not in raw:
            raise ValueError(f"{where}.{name}: missing")
