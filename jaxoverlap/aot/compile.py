"""The engine's programs compiled for a GPU that is not there, and what the compiler says of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxoverlap.aot.dumps import collectives, command_buffers, copies_of, custom_calls, spills
from jaxoverlap.aot.targets import Target
from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.config import EngineConfig
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.pool import cache_bytes
from jaxoverlap.device.programs import Over, Program, Programs
from jaxoverlap.device.state import State, initial_state
from jaxoverlap.device.step import Steps
from jaxoverlap.kernels.backend import Kernels, quiet_lowering
from jaxoverlap.models.decoder import Decoder
from jaxoverlap.models.layers import DecoderConfig
from jaxoverlap.models.sharding import ALONE, AXIS, MeshRanks, Split


class PluginError(ImportError):
    """JAX's CUDA plugin is not there, or not of jaxlib's version."""


def compile_devices(target: Target, count: int = 1) -> list[Any]:
    """Devices of the target, in one machine, that can be compiled for. Raises PluginError naming the extra to
    install."""
    try:
        with _environ(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name=target.name, topology=f"1x1x{count}", target_config=target.text()
            )
    except Exception as e:
        what = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise PluginError(
            f"JAX's CUDA plugin, which compiles for a GPU, is not usable ({what}): pip install 'jaxoverlap[aot]'"
        ) from e
    return list(topology.devices)


@dataclass(frozen=True)
class Plan:
    """What is compiled: `programs` by the names of the report, and the shapes of their arguments, of all ranks."""

    programs: dict[str, Program]
    weights: tuple[jax.ShapeDtypeStruct, ...]
    state: State  # of shapes
    vocab_size: int


def plan(
    model: DecoderConfig,
    target: Target,
    *,
    batch: int,
    tokens: int = 512,
    context: int = 4096,
    devices: Sequence[Any] = (),
) -> Plan:
    """One decode and one extend program (of `tokens`), the same cut in two, and the program that writes pages, for
    `batch` rows of up to `context` tokens with page 16, over a pool that fills them or the target's memory. With
    several `devices` all that is of each: they are data-parallel ranks with DP attention."""
    ranks = max(1, len(devices))
    dp: dict[str, Any] = {"dp_size": ranks, "enable_dp_attention": ranks > 1}
    config = EngineConfig(model_path="none", max_running_requests=batch, page_size=16, **dp)
    kernels = Kernels.choose("auto", "cuda")
    sharing = ALONE if ranks == 1 else MeshRanks(ranks)
    abstract = nnx.eval_shape(lambda: Decoder(model, kernels, sharing))
    graph, params = nnx.split(abstract)
    leaves, tree = named_leaves(params), jax.tree.structure(params)
    over, weights = None, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves.values())
    if ranks > 1:
        over, weights = _spread(leaves, abstract.splits(), devices)
    context = min(context, model.max_position_embeddings)
    held = sum(math.prod(_of_a_device(w)) * w.dtype.itemsize for w in weights)
    room = int(target.memory * config.mem_fraction_static) - held
    pages = min(batch * -(-context // 16), room // (16 * cache_bytes(abstract.cache_shapes, 1)) - 1)
    if pages < batch:
        raise ValueError(f"{target.name}: no room for {batch} rows beside the weights")
    num_locs = (pages + 1) * 16
    state = jax.eval_shape(
        lambda: initial_state(
            abstract.cache_shapes(num_locs),
            rows=batch + 1,
            pages=-(-context // 16),
            vocab_size=model.vocab_size,
            poison=False,
            script_len=0,
        )
    )
    if over is not None:
        state = jax.tree.map(over.shape, state)
    steps = Steps(graph=graph, tree=tree, page_size=16, num_locs=num_locs, kernels=kernels, poison=False)
    extend = Bucket(tokens, batch, tokens // 16 + batch, False)
    buckets = Buckets((Bucket(batch, batch, batch, True),), (extend,))
    programs = Programs(steps, buckets, vocab_size=model.vocab_size, cut=True, over=over)
    table = {re.sub(r"_\d+$", "", name): program for name, program in programs.table.items()}
    programs.close()
    return Plan(table, weights, state, model.vocab_size)


def _spread(
    leaves: Mapping[str, Any], splits: Mapping[str, Split], devices: Sequence[Any]
) -> tuple[Over, tuple[jax.ShapeDtypeStruct, ...]]:
    """The mesh of the devices, and the parameters' shapes on it."""
    mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
    specs, shapes = [], []
    for name, leaf in leaves.items():
        split = splits.get(name)
        spec = PartitionSpec() if split is None else PartitionSpec(*[None] * split.axis, AXIS)
        shape = leaf.shape if split is None else split.spread(leaf.shape, len(devices))
        specs.append(spec)
        shapes.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec)))
    return Over(mesh, tuple(specs)), tuple(shapes)


def _of_a_device(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def measure(work: Plan, name: str, device: Any) -> dict[str, Any]:
    """Compiles one program of the plan and reads the compiler's dumps: see `report`."""
    program = work.programs[name]
    assert program.donate is not None
    return report(program.call, program.shapes(work.weights, work.state), program.donate, device)


def report(call: Any, args: tuple[Any, ...], state: int, device: Any) -> dict[str, Any]:
    """Of a jitted `call` with argument `state` as its state.

    command_buffers: CUDA graphs; outside: operations that are in none; state_copies: copies of an array of the state;
    alias_bytes: arguments updated in place; state_bytes; temp_bytes: working memory; spills: bytes that our kernels
    spill, None where the version does not show their code; custom_calls: calls by target; collectives: between
    devices, see dumps.collectives; compile_s: seconds. Bytes are those of one device.
    """
    alone = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or alone), args
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with _abstract_gpu(device), quiet_lowering():
            lowered = call.lower(*shapes)
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_gpu_graph_min_graph_size": 1}
        with _no_compilation_cache():
            compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - start
        graphs, outside = command_buffers(Path(folder))
        spilled = spills(Path(folder))
    leaves = [jax.ShapeDtypeStruct(_of_a_device(x), x.dtype) for x in jax.tree.leaves(shapes[state])]
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "command_buffers": graphs,
        "outside": outside,
        "state_copies": copies_of(text, leaves),
        "alias_bytes": memory.alias_size_in_bytes,
        "state_bytes": sum(x.size * x.dtype.itemsize for x in leaves),
        "temp_bytes": memory.temp_size_in_bytes,
        "spills": spilled,
        "custom_calls": custom_calls(text),
        "collectives": collectives(text),
        "compile_s": round(seconds, 2),
    }


def _abstract_gpu(device: Any) -> contextlib.AbstractContextManager[Any]:
    """From jax 0.11 on Pallas asks for a device when it lowers; 0.10 must not be given one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    cores = getattr(device, "core_count", 0) or 132
    abstract = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract))


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """A program from JAX's persistent cache has no dumps, and without its device cannot be loaded at all."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # what it decided is kept for the whole process
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _environ(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
