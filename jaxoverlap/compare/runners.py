"""The runners that `jaxoverlap compare` can set side by side: JAX, and PyTorch on the model that JAX has loaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxoverlap.compare.measure import Comparison
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.progress import Report

CHOICES = ("jax", "jax,torch")
ON_CPU = (
    "On the CPU PyTorch computes before the launch call returns: its step is host work there, nothing can hide it, "
    "and overlap gains nothing."
)


def check(names: Sequence[str], config: EngineConfig) -> None:
    """Before anything is loaded. Raises ValueError or ImportError for what cannot be compared. Where two pools have to
    share a GPU, JAX is told not to take it all."""
    if "torch" not in names:
        return
    if config.device == "simulated":
        raise ValueError("--runner torch needs a model to compute: a simulated device has none")
    if config.dp_size > 1:
        raise ValueError(f"--runner torch compares one rank: dp_size must be 1, not {config.dp_size}")
    if config.schedule_policy == "random" and config.random_seed is None:
        raise ValueError("--runner jax,torch compares schedules: schedule_policy random needs a random_seed")
    if importlib.util.find_spec("torch") is None:
        raise ImportError('--runner torch needs PyTorch: pip install "jaxoverlap[torch]"')
    from jaxoverlap.compare.torch_runner import check_settings

    check_settings(config)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != "cpu" and config.max_total_tokens is None:
        raise ValueError("--runner jax,torch puts two KV pools on one GPU: set --max-total-tokens to what fits twice")


@contextmanager
def torch_engine(base: Engine, progress: Report) -> Iterator[Engine]:
    """An engine in PyTorch on `base`'s weights, device, settings and size of pool."""
    from jaxoverlap.compare.torch_checksum import TorchChecksum
    from jaxoverlap.compare.torch_model import TorchDecoder
    from jaxoverlap.compare.torch_runner import TorchRunner, default_device
    from jaxoverlap.models.registry import LoadedModel

    served = base.model
    assert isinstance(served, LoadedModel)
    model = TorchChecksum(served.config) if served.name == "checksum" else TorchDecoder.sharing(served.module)
    runner = TorchRunner(
        model,
        base.config,
        max_total_tokens=base.max_total_tokens,
        context_length=served.context_length,
        device=default_device(),
    )
    runner.warm_up(progress)
    try:
        with Engine.from_parts(base.config, served, runner, base.max_total_tokens) as engine:
            yield engine
    finally:
        runner.shutdown()


def largest_margin(bases: Mapping[str, Engine], comparison: Comparison, params: dict[str, Any]) -> float | None:
    """Of tokens that differ, see margins.py. None where rounding explains nothing (float32, sampled tokens) or PyTorch
    is not there to tell."""
    config = bases["jax"].model.config
    rounded = getattr(config, "dtype", "float32") == "bfloat16" and params["temperature"] == 0
    if "torch" not in bases or not rounded:
        return None
    from jaxoverlap.compare import margins
    from jaxoverlap.compare.torch_model import TorchDecoder

    return margins.largest_margin(comparison, TorchDecoder.sharing(bases["jax"].model.module))  # type: ignore[attr-defined]


def notes(engines: Sequence[Engine]) -> list[str]:
    """What a reader must know of the figures."""
    return [ON_CPU] if any(getattr(engine.runner, "is_synchronous", False) for engine in engines) else []
