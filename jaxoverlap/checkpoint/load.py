"""A directory's weights into a model, whichever format it holds. One parameter at a time is in memory beside what is
already placed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxoverlap.checkpoint import hf, orbax
from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.tree import ParameterTree
from jaxoverlap.progress import Report, silent

Checkpoint = hf.Checkpoint | orbax.Checkpoint
Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""(parameter, shape) -> where it goes."""
Put = Callable[[str, Callable[[], np.ndarray]], jax.Array]
"""(parameter, what reads all of it) -> the array on the devices."""


def open_checkpoint(directory: Path) -> Checkpoint:
    """Orbax where there is a folder weights/ of it, else safetensors. Raises CheckpointError where the directory holds
    both, neither, or what a save that was interrupted has left."""
    if not orbax.is_orbax(directory):
        return hf.Checkpoint(directory)
    if any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory}: holds both *.safetensors and {orbax.WEIGHTS}/ (Orbax): remove one")
    return orbax.Checkpoint(directory)


def load_parameters(
    build: Callable[[], Any],
    directory: Path,
    *,
    ignored: str = "$^",
    sharding: Place | None = None,
    put: Put | None = None,
    progress: Report | None = None,
) -> Any:
    """The module that `build` makes, its parameters taken from `directory` in the dtypes that the module states.

    The module says what it is made of: `parts()`, and `duplicates()` for tensors that may repeat another. `ignored`
    is a pattern of whole names of safetensors that are left aside. Parameters go to JAX's default device, or where
    `sharding` says: then of an Orbax checkpoint each device's share alone is read; or where `put` brings them. Raises
    CheckpointError naming a tensor that is missing, unknown, of the wrong shape or dtype, or cannot be divided so.
    """
    tree = ParameterTree.of(build)
    with open_checkpoint(directory) as checkpoint:
        checkpoint.check(tree, ignored)
        names = counted(tree, "loading weights", progress)
        if put is not None:
            return tree.module({name: put(name, partial(checkpoint.read, tree, name)) for name in names})
        return tree.module({name: _placed(checkpoint, tree, name, sharding) for name in names})


def read_parameters(
    build: Callable[[], Any], directory: Path, *, ignored: str = "$^", progress: Report | None = None
) -> dict[str, np.ndarray]:
    """As `load_parameters`, but left on the host, by parameter."""
    tree = ParameterTree.of(build)
    with open_checkpoint(directory) as checkpoint:
        checkpoint.check(tree, ignored)
        return {name: checkpoint.read(tree, name) for name in counted(tree, "reading weights", progress)}


def counted(tree: ParameterTree, label: str, progress: Report | None) -> Iterator[str]:
    """The tree's names; when the next one is asked for, the one before counts as done, in elements."""
    report, done = progress or silent, 0
    total = sum(leaf.size for leaf in tree.shapes.values())
    for name, leaf in tree.shapes.items():
        yield name
        done += leaf.size
        report(label, done, total)


def _placed(checkpoint: Checkpoint, tree: ParameterTree, name: str, sharding: Place | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(checkpoint.read(tree, name))
    shape = tree.shapes[name].shape
    where = sharding(name, shape)
    try:
        where.shard_shape(shape)
    except ValueError as e:
        raise CheckpointError(f"parameter {name} of shape {list(shape)} cannot be placed: {e}") from None
    return jax.make_array_from_callback(shape, where, lambda index: checkpoint.read(tree, name, index or ()))
