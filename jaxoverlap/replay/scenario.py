"""A scenario file: settings, what arrives when, forced tokens. The format is tests/conformance/README.md's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxoverlap.config import EngineConfig

CONTEXT_LENGTH = 4096
VOCAB_SIZE = 1000
EOS = 2
SAME_NAME = (
    "max_running_requests max_total_tokens chunked_prefill_size max_prefill_tokens schedule_policy page_size "
    "schedule_conservativeness enable_mixed_chunk disable_radix_cache stream_interval retract_decode_steps "
    "disable_consecutive_prefill_overlap init_new_token_ratio enable_priority_scheduling dp_size "
    "schedule_low_priority_values_first priority_scheduling_preemption_threshold disable_priority_preemption"
).split()
OPERATIONS = {
    "request": {
        "rid", "prompt_ids", "max_new_tokens", "ignore_eos", "stop_token_ids", "stop", "grammar", "return_logprob",
        "priority", "rank",
    },
    "abort": {"rid", "all"},
    "pause": {"mode"},
    "continue": set(),
}  # fmt: skip


class ScenarioError(ValueError):
    """The file is no scenario; the message names the file and the field."""


@dataclass(frozen=True)
class Scenario:
    name: str
    config: dict[str, Any]  # EngineConfig fields, but for the loop
    ops: list[dict[str, Any]]
    force: dict[str, dict[int, int]] = field(default_factory=dict)
    grammar_compile_turns: int = 0
    idle_tail: int = 2
    max_turns: int = 60

    def engine_config(self, overlap: bool, **more: Any) -> EngineConfig:
        return EngineConfig(model_path="checksum", disable_overlap_schedule=not overlap, **{**self.config, **more})


def load_scenario(path: str | Path) -> Scenario:
    """Reads `scenario` and nothing else of a file. Raises ScenarioError."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ScenarioError(f"{path}: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("scenario"), dict):
        raise ScenarioError(f"{path}: no 'scenario' in it")
    try:
        return parse_scenario(data["scenario"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ScenarioError(f"{path}: {type(e).__name__}: {e}") from None


def parse_scenario(raw: dict[str, Any]) -> Scenario:
    """Raises ValueError naming what is wrong, KeyError for a missing field."""
    config: dict[str, Any] = {}
    for name, value in raw["config"].items():
        if name == "speculative":
            for key in ("num_steps", "num_draft_tokens"):
                config[f"speculative_{key}"] = value[key]
            config["speculative_eagle_topk"] = value["topk"]
        elif name in SAME_NAME:
            config[name] = value
        else:
            raise ValueError(f"unknown setting {name!r} in config")
    for op in raw["ops"]:
        if op["op"] not in OPERATIONS:
            raise ValueError(f"unknown op {op['op']!r}")
        unknown = set(op) - OPERATIONS[op["op"]] - {"op", "at"}
        if unknown:
            raise ValueError(f"unknown field {sorted(unknown)[0]!r} in op {op['op']!r}")
    known = {"name", "about", "config", "ops", "force", "grammar_compile_turns", "idle_tail", "max_turns"}
    if set(raw) - known:
        raise ValueError(f"unknown field {sorted(set(raw) - known)[0]!r}")
    force = {rid: {int(i): t for i, t in tokens.items()} for rid, tokens in raw.get("force", {}).items()}
    scenario = Scenario(
        raw["name"], config, raw["ops"], force, raw.get("grammar_compile_turns", 0), raw.get("idle_tail", 2), raw.get("max_turns", 60)
    )
    scenario.engine_config(overlap=True)
    return scenario
