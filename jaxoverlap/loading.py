"""From a configuration to what an Engine stands on: the loaded model and a warmed-up runner."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxoverlap.config import EngineConfig
from jaxoverlap.paths import cache_dir
from jaxoverlap.progress import Report, silent

if TYPE_CHECKING:
    from jaxoverlap.device.runner import JaxRunner
    from jaxoverlap.models.registry import LoadedModel


def load(config: EngineConfig, progress: Report | None = None) -> tuple[LoadedModel, JaxRunner, int]:
    """(model, runner, KV pool in tokens). Compiles every program unless `skip_warmup`, through the persistent cache
    in `compiled/` of the cache folder."""
    check_supported(config)
    report = progress or silent

    from jaxoverlap.device.compile_cache import enable_compilation_cache
    from jaxoverlap.device.pool import default_max_total_tokens
    from jaxoverlap.device.runner import JaxRunner
    from jaxoverlap.models import registry

    enable_compilation_cache(cache_dir() / "compiled")
    model = registry.load(config, progress=report)
    total = config.max_total_tokens
    if total is None:
        total = default_max_total_tokens(model.module.cache_shapes, config, model.context_length)
    runner = JaxRunner(model.module, config, max_total_tokens=total, context_length=model.context_length)
    if not config.skip_warmup:
        runner.warm_up(lambda done, total, _: report("compile", done, total))
    return model, runner, total


def check_supported(config: EngineConfig) -> None:
    """Raises ValueError naming a setting that exists for later and must be left at its default."""
    for field in dataclasses.fields(config):
        if not field.metadata["flag"] and getattr(config, field.name) != field.default:
            raise ValueError(f"{field.name} is not supported yet: leave it at {field.default}")
