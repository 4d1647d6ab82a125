"""From a configuration with several ranks to the loaded model and a runner of all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.device import advice
from jaxoverlap.device.compile_cache import enable_compilation_cache
from jaxoverlap.device.pool import check_pool_settings, default_max_total_tokens
from jaxoverlap.loading import takes_grammars
from jaxoverlap.models import registry
from jaxoverlap.parallel.mesh import RankMesh
from jaxoverlap.parallel.processes import process_count
from jaxoverlap.parallel.runner import RankRunner
from jaxoverlap.parallel.sync import FactExchange, exchange_devices
from jaxoverlap.paths import cache_dir
from jaxoverlap.progress import Report


def load_ranks(config: EngineConfig, report: Report) -> tuple[registry.LoadedModel, RankRunner, int]:
    """As loading.load, over `dp_size` devices."""
    advice.warn(os.environ)
    devices = rank_devices(config.dp_size)
    check_pool_settings(config, devices[0].platform)
    enable_compilation_cache(cache_dir() / "compiled")
    mesh = RankMesh(devices)
    exchange = FactExchange(exchange_devices(config.dp_sync, devices, not config.disable_overlap_schedule))
    check_settings(config, mesh, exchange)
    model = registry.load(config, mesh=mesh, progress=report)
    check_alike({"the model's configuration": repr(model.config), "the weights": mesh.fingerprint}, mesh, exchange)
    total = config.max_total_tokens
    if total is None:
        total = default_max_total_tokens(
            model.module.cache_shapes, config, model.context_length, devices[mesh.local[0]], ranks=len(mesh.local)
        )
        total = int(exchange(np.full((len(mesh.local), 1), total)).min())  # all run one program: of one size
    runner = RankRunner(
        model.module,
        config,
        mesh,
        max_total_tokens=total,
        context_length=model.context_length,
        exchange=exchange,
        cut=takes_grammars(config, model),
    )
    if not config.skip_warmup:
        runner.warm_up(lambda done, total, _: report("compile", done, total))
    return model, runner, total


def check_settings(config: EngineConfig, mesh: RankMesh, exchange: FactExchange) -> None:
    """Raises ValueError naming the settings that differ between processes; models are compared once loaded."""
    settings = dataclasses.asdict(config)
    for name in ("model_path", "random_seed"):
        del settings[name]
    check_alike(settings, mesh, exchange)


def check_alike(values: Mapping[str, Any], mesh: RankMesh, exchange: FactExchange) -> None:
    """Raises ValueError naming those of `values` that are not the same in all processes."""
    own = [zlib.crc32(repr(value).encode()) >> 1 for value in values.values()]  # fits an int32
    table = exchange(np.array([own] * len(mesh.local)))
    names = [name for name, column in zip(values, table.T) if len(set(column.tolist())) > 1]
    if names:
        raise ValueError(f"not the same in all processes: {', '.join(names)}")


def rank_devices(dp_size: int) -> list[jax.Device]:
    """A device for each rank, as many of every process. On CPU, where JAX has not started yet, as many virtual ones as
    this process has ranks. Raises ValueError where there are too few, or the ranks do not divide."""
    processes = process_count()
    if dp_size % processes:
        raise ValueError(f"dp_size {dp_size} must be a multiple of the {processes} processes")
    local = dp_size // processes
    want_cpu_devices(local)
    by_process = [[d for d in jax.devices() if d.process_index == p] for p in range(processes)]
    for process, devices in enumerate(by_process):
        if len(devices) < local:
            where = f" in process {process}" if processes > 1 else ""
            raise ValueError(
                f"dp_size {dp_size} needs {local} devices{where}, and JAX has {len(devices)} "
                f"({jax.default_backend()}): on CPU set jax_num_cpu_devices before JAX starts"
            )
    return [d for devices in by_process for d in devices[:local]]


def want_cpu_devices(count: int) -> None:
    """Asks for that many CPU devices, where JAX has not started yet and nobody has asked for as many."""
    if jax.config.values["jax_num_cpu_devices"] >= count:
        return
    with contextlib.suppress(RuntimeError):  # it has started, with what it has
        jax.config.update("jax_num_cpu_devices", count)
