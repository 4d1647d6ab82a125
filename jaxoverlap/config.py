"""EngineConfig: every setting of the engine, validated once. Flags and environment variables derive from its fields.

Field names are SGLang's server arguments where it has one. Precedence: argument or flag, then `JAXOVERLAP_<FIELD>`,
then the default here. Imports no jax.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ENV_PREFIX = "JAXOVERLAP_"
OTHER_VARIABLES = {"JAXOVERLAP_CACHE_DIR"}  # read elsewhere (paths.py)
NEED_PRIORITIES = (
    "schedule_low_priority_values_first",
    "priority_scheduling_preemption_threshold",
    "disable_priority_preemption",
)
NEED_RANKS = ("enable_dp_attention", "load_balance_method", "dp_sync")
NEED_DRAFT_MODEL = ("speculative_num_steps", "speculative_draft_model_path", "speculative_draft_layers")
NEED_SPECULATION = ("speculative_num_draft_tokens", *NEED_DRAFT_MODEL)
DRAFT_MODELS = ("STANDALONE", "EAGLE3")
DEFAULT_DRAFT_TOKENS = 4  # SGLang's of STANDALONE; its 12 of NGRAM are a tree's
MOST_DRAFT_TOKENS = 32
INT32_MAX = (1 << 31) - 1
WHITESPACE = re.compile(r"(?:[ \t\n\r\[\]()*+?|]|\\[tnr]|\{[0-9]+(?:,[0-9]*)?\})*")  # regular expressions of it
POSITIVE = (
    *("context_length", "max_running_requests", "max_total_tokens", "page_size", "max_prefill_tokens"),
    *("stream_interval", "new_token_ratio_decay_steps", "retract_decode_steps", "dp_size"),
    *("clip_max_new_tokens", "speculative_eagle_topk"),
)


def setting(default: Any, about: str, flag: bool = True) -> Any:
    """`flag=False`: not offered on the command line and in the environment yet."""
    return dataclasses.field(default=default, metadata={"about": about, "flag": flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ValueError naming the field and its limit. Lengths and totals are in tokens."""

    model_path: str = setting(
        "auto",
        "demo model, 'checksum', or a Hugging Face or Orbax directory; auto: smollm2-135m, simulated devices checksum",
    )
    device: Literal["auto", "simulated"] = setting(
        "auto", "auto: JAX's default; simulated: no model, steps of a set time, tokens of the checksum rule"
    )
    step_ms: float | None = setting(None, "time of a simulated decode step [8]")
    prefill_step_ms: float | None = setting(None, "time of a simulated prefill step [step_ms]")
    step_jitter: float | None = setting(None, "simulated steps vary by up to this share, evenly [0]")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "compute and KV dtype; auto: float32 on CPU, else the checkpoint's"
    )
    context_length: int | None = setting(None, "longest prompt + completion; default: the model's")
    max_running_requests: int = setting(16, "request slots")
    max_total_tokens: int | None = setting(None, "KV pool in tokens; default: what the device's memory allows")
    mem_fraction_static: float = setting(0.9, "share of a GPU's memory for weights and KV pool")
    page_size: int = setting(1, "tokens in a KV page")
    chunked_prefill_size: int = setting(512, "longest prefill in one step; -1: no chunking")
    max_prefill_tokens: int = setting(16384, "prompt tokens admitted to one prefill batch")
    schedule_policy: Literal["fcfs", "lpm", "lof", "dfs-weight", "random"] = setting(
        "fcfs", "order of the waiting queue"
    )
    schedule_conservativeness: float = setting(1.0, "scales the share of output tokens reserved at admission")
    enable_mixed_chunk: bool = setting(False, "decode rows join prefill batches")
    disable_radix_cache: bool = setting(False, "no prefix reuse")
    disable_overlap_schedule: bool = setting(False, "event_loop_normal instead of event_loop_overlap")
    disable_consecutive_prefill_overlap: bool = setting(
        False, "handle a prefill's result before launching the next prefill (SGLang's environment switch)"
    )
    stream_interval: int = setting(1, "completion tokens between streamed pieces")
    max_logprobs: int = setting(
        0,
        "largest top_logprobs_num and number of token_ids_logprob; 0: none, no log-probabilities of prompts, and a "
        "shorter warm-up",
    )
    random_seed: int | None = setting(None, "seed of unseeded requests; default: fresh each run")
    init_new_token_ratio: float = setting(0.7, "share of a request's output cap reserved at admission")
    min_new_token_ratio_factor: float = setting(0.14, "lowest ratio as a share of the initial one")
    new_token_ratio_decay_steps: int = setting(600, "decode turns from the initial to the lowest ratio")
    retract_decode_steps: int = setting(20, "decode steps freed ahead for the rows that survive a retraction")
    clip_max_new_tokens: int = setting(4096, "cap on the output estimate at admission")
    enable_priority_scheduling: bool = setting(False, "requests carry priorities")
    schedule_low_priority_values_first: bool = setting(False, "lower priority values go first")
    priority_scheduling_preemption_threshold: int = setting(10, "priority lead that preempts a running request")
    disable_priority_preemption: bool = setting(False, "priorities order the queue only")
    strict_aliasing: bool = setting(True, "overlap decision on SGLang's live batch objects; False: on snapshots")
    overrun: Literal["sglang", "skip-known"] = setting(
        "sglang", "skip-known: no step for a request whose length limit is already known to be reached"
    )
    finish_order: Literal["sglang", "stop-first"] = setting(
        "sglang", "stop-first: a stop at the cap is reported as a stop"
    )
    grammar_backend: Literal["llguidance", "none"] = setting(
        "llguidance", "what compiles json_schema, regex and ebnf; none: they are refused, and fewer programs compiled"
    )
    grammar_timeout: float = setting(50.0, "seconds that a request waits for its grammar to be compiled")
    constrained_json_whitespace_pattern: str = setting(
        "[ ]?", "regular expression of what may stand between the parts of constrained JSON"
    )
    delay_sampling: Literal["sglang", "when-needed"] = setting(
        "sglang", "when-needed: not where every mask is known before the result in flight is; the same tokens"
    )
    deterministic: bool = setting(
        False, "tokens bit-equal in any company: every step computes as many rows as chunked_prefill_size"
    )
    audit: bool = setting(False, "check pages, slots and locks after every turn (debug)")
    poison_future_map: bool = setting(False, "poison FutureMap rows and check every gather (debug)")
    kernels: Literal["auto", "pallas", "xla", "interpret"] = setting(
        "auto", "implementation of the kernels; auto: the platform's default"
    )
    skip_warmup: bool = setting(False, "compile on first use instead of before the first request")

    dp_size: int = setting(1, "data-parallel ranks; the settings of batches and KV pool are of each rank")
    enable_dp_attention: bool = setting(
        False, "ranks compute attention for their own requests and share MLPs and vocabulary; dp_size above 1 needs it"
    )
    load_balance_method: Literal["round_robin", "shortest_queue"] = setting(
        "round_robin", "rank of a request that names none; shortest_queue: with the fewest unfinished requests"
    )
    dp_sync: Literal["auto", "host", "accelerator"] = setting(
        "auto", "devices of the ranks' exchange before each launch; auto: the host's with overlap, else the ranks' own"
    )
    speculative_algorithm: Literal["none", "NGRAM", "STANDALONE", "EAGLE3", "EAGLE"] = setting(
        "none",
        "NGRAM: drafts from the request's own tokens; STANDALONE: from a model; EAGLE3: from a head on the model; "
        "EAGLE: replayed traces only",
    )
    speculative_draft_model_path: str | None = setting(
        None, "STANDALONE: the draft model, as model_path; EAGLE3: the head's Hugging Face directory"
    )
    speculative_draft_layers: int | None = setting(None, "STANDALONE: draft with the first layers of the model itself")
    speculative_num_steps: int = setting(
        0, "tokens that a model or a head drafts in a row; 0: one below the next setting"
    )
    speculative_num_draft_tokens: int = setting(0, "tokens of a row that a verify step scores; 0: 4 with speculation")
    speculative_grammar_overlap: bool = setting(False, "draft for grammar rows before the result in flight is handled")
    speculative_eagle_topk: int = setting(1, "branches of a draft tree", flag=False)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _checked(f.name, getattr(self, f.name), hints[f.name]))
        self._check_device()
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("init_new_token_ratio", "min_new_token_ratio_factor", "mem_fraction_static"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if self.max_logprobs < 0:
            raise ValueError(f"max_logprobs must be at least 0, not {self.max_logprobs}")
        for name in ("schedule_conservativeness", "grammar_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        pattern = self.constrained_json_whitespace_pattern
        if not WHITESPACE.fullmatch(pattern):
            raise ValueError(
                f"constrained_json_whitespace_pattern must match spaces, \\t, \\n and \\r only, not {pattern!r}"
            )
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise ValueError(f"chunked_prefill_size must be -1 or at least 1, not {self.chunked_prefill_size}")
        if self.chunked_prefill_size > 0 and self.chunked_prefill_size % self.page_size:
            raise ValueError(
                f"chunked_prefill_size {self.chunked_prefill_size} must be a multiple of page_size {self.page_size}"
            )
        if self.max_total_tokens is not None and self.max_total_tokens % self.page_size:
            raise ValueError(
                f"max_total_tokens {self.max_total_tokens} must be a multiple of page_size {self.page_size}"
            )
        self._check_priorities()
        self._check_ranks()
        self._check_speculation()
        if self.deterministic and self.chunked_prefill_size == -1:
            raise ValueError("deterministic needs chunked_prefill_size: it is the size of every step")
        if self.deterministic and self.speculative_num_draft_tokens:
            raise ValueError("deterministic and speculation exclude each other: a verify step has another shape")
        if self.enable_mixed_chunk and self.chunked_prefill_size == -1:
            raise ValueError("enable_mixed_chunk needs chunked_prefill_size")
        if self.enable_mixed_chunk and self.speculative_num_draft_tokens:
            raise ValueError(
                "enable_mixed_chunk and speculation exclude each other: a verify step cannot join a prefill"
            )
        if self.random_seed is not None and not 0 <= self.random_seed < 1 << 32:
            raise ValueError(f"random_seed must be at least 0 and below 2**32, not {self.random_seed}")

    def _check_ranks(self) -> None:
        if self.dp_size > 1 and not self.enable_dp_attention:
            raise ValueError(
                f"dp_size {self.dp_size} needs enable_dp_attention: ranks with weights of their own are not built"
            )
        for f in dataclasses.fields(self):
            if f.name in NEED_RANKS and self.dp_size == 1 and getattr(self, f.name) != f.default:
                raise ValueError(f"{f.name} needs dp_size above 1")

    def _check_speculation(self) -> None:
        """Also settles the drafts' number."""
        if self.speculative_eagle_topk != 1:
            raise ValueError(f"speculative_eagle_topk must be 1 (chains), not {self.speculative_eagle_topk}")
        algorithm = self.speculative_algorithm
        for name in NEED_DRAFT_MODEL if algorithm != "none" else NEED_SPECULATION:
            allowed = DRAFT_MODELS[:1] if name == "speculative_draft_layers" else DRAFT_MODELS
            if algorithm not in (*allowed, "EAGLE") and getattr(self, name):
                needed = "" if name not in NEED_DRAFT_MODEL else f" {' or '.join(allowed)}"
                raise ValueError(f"{name} needs speculative_algorithm{needed}")
        if algorithm in ("none", "EAGLE"):
            if self.speculative_grammar_overlap:
                drafts = "NGRAM, STANDALONE or EAGLE3"
                raise ValueError(f"speculative_grammar_overlap needs speculative_algorithm {drafts}, not {algorithm}")
            return
        steps, tokens = self.speculative_num_steps, self.speculative_num_draft_tokens
        if steps < 0 or tokens < 0:
            raise ValueError("speculative_num_steps and speculative_num_draft_tokens must be at least 0")
        if tokens == 0:
            tokens = steps + 1 if steps else DEFAULT_DRAFT_TOKENS
            object.__setattr__(self, "speculative_num_draft_tokens", tokens)
        if not 2 <= tokens <= MOST_DRAFT_TOKENS:
            raise ValueError(f"speculative_num_draft_tokens must be 2 to {MOST_DRAFT_TOKENS}, not {tokens}")
        if algorithm == "NGRAM":
            return
        if steps not in (0, tokens - 1):
            raise ValueError(
                f"speculative_num_draft_tokens {tokens} must be speculative_num_steps {steps} + 1: drafts are chains"
            )
        object.__setattr__(self, "speculative_num_steps", tokens - 1)
        if algorithm == "EAGLE3":
            if self.speculative_draft_model_path is None:
                raise ValueError("EAGLE3 needs speculative_draft_model_path, the directory of the head")
            return
        if (self.speculative_draft_model_path is None) == (self.speculative_draft_layers is None):
            raise ValueError("STANDALONE needs one of speculative_draft_model_path and speculative_draft_layers")
        if self.speculative_draft_layers is not None and self.speculative_draft_layers < 1:
            raise ValueError(f"speculative_draft_layers must be at least 1, not {self.speculative_draft_layers}")

    def _check_device(self) -> None:
        """Also settles model_path "auto"."""
        simulated = self.device == "simulated"
        if self.model_path == "auto":
            object.__setattr__(self, "model_path", "checksum" if simulated else "smollm2-135m")
        for name in ("step_ms", "prefill_step_ms", "step_jitter"):
            value = getattr(self, name)
            if value is None:
                continue
            if not simulated:
                raise ValueError(f"{name} needs device simulated")
            if not 0 <= value < (1 if name == "step_jitter" else float("inf")):
                raise ValueError(
                    f"{name} must be at least 0 and {'below 1' if name == 'step_jitter' else 'finite'}, not {value}"
                )
        if not simulated:
            return
        if self.model_path != "checksum":
            raise ValueError(f"device simulated runs no model: model_path must be checksum, not {self.model_path!r}")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in (
            *("dtype", "mem_fraction_static", "kernels", "poison_future_map", "deterministic"),
            *("max_logprobs", "speculative_algorithm"),
        ):
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} means nothing on device simulated: leave it at {defaults[name]}")

    def _check_priorities(self) -> None:
        if self.enable_priority_scheduling:
            if self.schedule_policy not in ("fcfs", "lof"):
                raise ValueError(
                    f"enable_priority_scheduling goes with schedule_policy fcfs or lof, not {self.schedule_policy}"
                )
            return
        for f in dataclasses.fields(self):
            if f.name in NEED_PRIORITIES and getattr(self, f.name) != f.default:
                raise ValueError(f"{f.name} needs enable_priority_scheduling")

    @property
    def verify_reserve(self) -> int:
        """Places that a verify step keeps behind a row's committed tokens, 0 without speculation: SGLang's twice the
        drafts, for the result in flight may have accepted as many."""
        return 2 * max(self.speculative_num_steps, self.speculative_num_draft_tokens)

    @classmethod
    def check_environment(cls, environ: Mapping[str, str] | None = None) -> None:
        """Raises ValueError naming a variable of ours that is no setting, or its value if it is none for it."""
        cls.from_sources({}, environ)

    @classmethod
    def from_sources(
        cls,
        given: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> EngineConfig:
        """`given` over the environment over `defaults` (a command's own) over the fields' defaults. Raises ValueError
        naming an unknown field or variable."""
        env = os.environ if environ is None else environ
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in given:
            if name not in known:
                raise ValueError(f"unknown setting {name!r}; known: {', '.join(known)}")
        values: dict[str, Any] = {}
        hints = typing.get_type_hints(cls)
        for variable, text in env.items():
            if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
                continue
            name = variable[len(ENV_PREFIX) :].lower()
            if name not in known or not known[name].metadata["flag"]:
                raise ValueError(f"unknown environment variable {variable}; it matches no setting")
            try:
                values[name] = parse(text, hints[name])
            except ValueError as e:
                raise ValueError(f"environment variable {variable}: {e}") from None
        return cls(**{**(defaults or {}), **values, **given})


def parse(text: str, hint: Any) -> Any:
    """A flag's or variable's text as the field's type. Raises ValueError saying what is allowed."""
    if typing.get_origin(hint) is types.UnionType:
        if text.lower() == "none":
            return None
        return parse(text, next(a for a in typing.get_args(hint) if a is not type(None)))
    if typing.get_origin(hint) is Literal:
        if text not in typing.get_args(hint):
            raise ValueError(f"{text!r} is none of {', '.join(typing.get_args(hint))}")
        return text
    if hint is bool:
        if text.lower() not in ("1", "true", "0", "false"):
            raise ValueError(f"{text!r} is none of 1, true, 0, false")
        return text.lower() in ("1", "true")
    if hint is str:
        return text
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"{text!r} is no {hint.__name__}") from None


def _checked(name: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is types.UnionType:
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{name} must be one of {', '.join(typing.get_args(hint))}, not {value!r}")
        return value
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number")
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
        if abs(value) > INT32_MAX and name != "random_seed":
            raise ValueError(f"{name} must be at most {INT32_MAX}, not {value}")
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ValueError(f"{name} must be a {hint.__name__}, not {value!r}")
    return value
