"""From a configuration to what an Engine stands on: the loaded model and a warmed-up runner."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Protocol

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Runner
from jaxoverlap.paths import cache_dir
from jaxoverlap.progress import Report, silent
from jaxoverlap.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxoverlap.grammar.backend import LLGuidanceBackend

NOT_WITH_RANKS = ("speculative_algorithm", "max_logprobs", "deterministic")


class ServedModel(Protocol):
    """What an engine reads of a model: models.registry.LoadedModel, or the simulated device's."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Any:
        """With `vocab_size` and `eos_token_ids`."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def context_length(self) -> int: ...

    @property
    def sampling_defaults(self) -> dict[str, Any]: ...


class OwnedRunner(Runner, Protocol):
    def shutdown(self) -> None:
        """Gives the device's memory back."""


def load(config: EngineConfig, progress: Report | None = None) -> tuple[ServedModel, OwnedRunner, int]:
    """(model, runner, KV pool in tokens). Compiles every program unless `skip_warmup`, through the persistent cache
    in `compiled/` of the cache folder. A simulated device needs neither jax nor a model."""
    check_supported(config)
    report = progress or silent
    if config.device == "simulated":
        from jaxoverlap.device.simulated import simulate

        return simulate(config)

    if config.dp_size > 1:
        from jaxoverlap.parallel.load import load_ranks

        return load_ranks(config, report)

    import jax

    from jaxoverlap.device import advice
    from jaxoverlap.device.compile_cache import enable_compilation_cache
    from jaxoverlap.device.pool import check_pool_settings, default_max_total_tokens
    from jaxoverlap.device.runner import JaxRunner
    from jaxoverlap.models import registry
    from jaxoverlap.speculative.load import all_caches, load_speculator

    advice.warn(os.environ)
    check_pool_settings(config, jax.devices()[0].platform)
    enable_compilation_cache(cache_dir() / "compiled")
    model = registry.load(config, progress=report)
    speculator = load_speculator(config, model, progress=report)
    total = config.max_total_tokens
    if total is None:
        shapes = model.module.cache_shapes if speculator is None else all_caches(model.module, speculator)
        total = default_max_total_tokens(shapes, config, model.context_length)
    runner = JaxRunner(
        model.module,
        config,
        max_total_tokens=total,
        context_length=model.context_length,
        cut=takes_grammars(config, model),
        speculator=speculator,
    )
    if not config.skip_warmup:
        runner.warm_up(lambda done, total, _: report("compile", done, total))
    return model, runner, total


def takes_grammars(config: EngineConfig, model: ServedModel) -> bool:
    return config.grammar_backend != "none" and model.tokenizer is not None


def load_grammar_backend(config: EngineConfig, model: ServedModel) -> LLGuidanceBackend | None:
    """None where the configuration or the model takes no grammars."""
    if not takes_grammars(config, model):
        return None
    from jaxoverlap.grammar.backend import LLGuidanceBackend

    assert model.tokenizer is not None
    return LLGuidanceBackend(
        model.tokenizer,
        model.config.vocab_size,
        model.config.eos_token_ids,
        config.constrained_json_whitespace_pattern,
    )


def check_supported(config: EngineConfig) -> None:
    """Raises ValueError naming a setting that exists for later and must be left at its default."""
    for field in dataclasses.fields(config):
        if not field.metadata["flag"] and getattr(config, field.name) != field.default:
            raise ValueError(f"{field.name} is not supported yet: leave it at {field.default}")
    if config.dp_size > 1:
        defaults = {f.name: f.default for f in dataclasses.fields(config)}
        for name in NOT_WITH_RANKS:
            if getattr(config, name) != defaults[name]:
                raise ValueError(f"{name} is not supported with dp_size above 1: leave it at {defaults[name]}")
    if config.speculative_algorithm == "EAGLE":
        raise ValueError("speculative_algorithm EAGLE is for replayed traces: use NGRAM, STANDALONE or EAGLE3")
    if config.speculative_algorithm != "none" and config.max_logprobs:
        raise ValueError("max_logprobs and speculative_algorithm exclude each other: verify steps give no details")
