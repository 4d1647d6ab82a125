"""Hugging Face directories to Orbax ones and back: no tensor's name, dtype, shape or bit changes on the round trip."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxoverlap.checkpoint import hf, orbax
from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.load import counted
from jaxoverlap.checkpoint.orbax import DTYPES
from jaxoverlap.checkpoint.replace import Replacement
from jaxoverlap.checkpoint.tree import ParameterTree, Piece
from jaxoverlap.progress import Report, silent

SHARD_BYTES = 2_000_000_000  # of one safetensors file, which is in memory while it is written


def convert(
    source: Path, destination: Path, tree: ParameterTree, *, ignored: str = "$^", progress: Report | None = None
) -> None:
    """Writes `source` to `destination` in the other format. A former checkpoint there stays until the new one is
    whole. Tensors that match `ignored` are left behind. Raises CheckpointError as the readers and Replacement do, and
    where the destination would take the source with it."""
    if destination.resolve() in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{destination} holds the source {source}: choose another destination")
    if orbax.is_orbax(source):
        to_hf(source, destination, tree, progress=progress)
    else:
        to_orbax(source, destination, tree, ignored=ignored, progress=progress)


def to_orbax(
    source: Path, destination: Path, tree: ParameterTree, *, ignored: str = "$^", progress: Report | None = None
) -> None:
    """Parameters are stored in their tensors' dtype; a fused one whose tensors differ, in float32, which holds all."""
    with hf.Checkpoint(source) as checkpoint:
        checkpoint.check(tree, ignored)
        wanted = {piece.tensor for name in tree.shapes for piece in tree.pieces(name)}
        tensors = {name: checkpoint.dtype(name) for name in checkpoint.where if name in wanted | tree.duplicates.keys()}
        stored = tree.with_dtypes({name: _common(tensors[p.tensor] for p in tree.pieces(name)) for name in tree.shapes})
        cpu = jax.local_devices(backend="cpu")[0]  # takes the arrays over, and Orbax them from there
        names = counted(stored, "reading", progress)
        weights = {name: jax.device_put(checkpoint.read(stored, name), cpu) for name in names}
    orbax.save(destination, weights, files=source, tensors=tensors).wait(progress)


def to_hf(
    source: Path,
    destination: Path,
    tree: ParameterTree,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Report | None = None,
) -> None:
    """One model.safetensors, or several of at most `shard_bytes` (a larger tensor has its own) and their index."""
    with orbax.Checkpoint(source) as checkpoint, Replacement(destination) as folder:
        checkpoint.check(tree)
        plan = _plan(checkpoint, tree)
        shards = list(_shards(plan, shard_bytes))
        total, done, report = sum(one.size for one in plan), 0, progress or silent
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            save_file({t.name: t.read(checkpoint) for t in shard}, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # written as private; a model directory may be shared
            weight_map |= {tensor.name: file for tensor in shard}
            done += sum(tensor.size for tensor in shard)
            report("saving", done, total)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / hf.INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        orbax.copy_files(source, folder)  # last: without config.json nobody takes the folder for whole


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A safetensors tensor: a piece of a parameter. `size` in bytes."""

    name: str
    parameter: str
    piece: Piece
    dtype: np.dtype
    size: int

    def read(self, checkpoint: orbax.Checkpoint) -> np.ndarray:
        return checkpoint.array(self.parameter, self.dtype, self.piece.index)


def _plan(checkpoint: orbax.Checkpoint, tree: ParameterTree) -> list[_Tensor]:
    plan: dict[str, _Tensor] = {}

    def add(name: str, parameter: str, piece: Piece) -> None:
        dtype = DTYPES.get(checkpoint.tensors.get(name, ""), checkpoint.shapes[parameter].dtype)
        plan[name] = _Tensor(name, parameter, piece, dtype, math.prod(piece.shape) * dtype.itemsize)

    for parameter in tree.shapes:
        for piece in tree.pieces(parameter):
            add(piece.tensor, parameter, piece)
    for name, twin in tree.duplicates.items():
        if name in checkpoint.tensors:  # the first directory had it too
            add(name, plan[twin].parameter, plan[twin].piece)
    return list(plan.values())


def _shards(plan: list[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    shard: list[_Tensor] = []
    for tensor in plan:
        if shard and sum(one.size for one in shard) + tensor.size > limit:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _common(dtypes: Iterator[str]) -> np.dtype:
    names = set(dtypes)
    return DTYPES[names.pop()] if len(names) == 1 else DTYPES["F32"]
