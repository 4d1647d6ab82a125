"""A model's parameters by name, before they have values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.parts import Parts

ALIGNMENT = 64  # bytes; the CPU backend takes such memory over without a copy
Index = tuple[int | slice, ...]  # a part of an array, as NumPy takes it and jax's shardings give it; (): all of it


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint's tensor of this shape, which is the part of a parameter at `index`."""

    tensor: str
    index: Index
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterTree:
    """What a module is made of: shape and dtype of each parameter, by its dotted path ("layers.0.mlp.down.weight")."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    parts: Parts
    duplicates: dict[str, str]  # tensors that a checkpoint may hold beside an equal one, see Decoder.duplicates
    _graph: Any
    _tree: Any

    @classmethod
    def of(cls, build: Callable[[], Any]) -> ParameterTree:
        """Of the module that `build` makes, which is not made. Raises CheckpointError where the module's `parts()` do
        not cover each parameter once."""
        module = nnx.eval_shape(build)
        graph, state = nnx.split(module)
        shapes, parts = named_leaves(state), module.parts()
        check_cover(shapes, parts)
        return cls(shapes, parts, module.duplicates(), graph, jax.tree.structure(state))

    def with_dtypes(self, dtypes: Mapping[str, Any]) -> ParameterTree:
        """The same parameters in other dtypes, given for each."""
        shapes = {name: jax.ShapeDtypeStruct(leaf.shape, dtypes[name]) for name, leaf in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes)

    def pieces(self, name: str) -> list[Piece]:
        """The tensors that parameter `name` is made of."""
        pieces = []
        for part in self.parts[name]:
            end, *rest = self.shapes[name].shape[len(part.at) :]
            stop = end if part.stop is None else part.stop
            index: Index = (*part.at, slice(part.start, stop))
            pieces.append(Piece(part.name, index, (stop - part.start, *rest)))
        return pieces

    def module(self, arrays: Mapping[str, jax.Array]) -> Any:
        """The module with these parameters."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, [arrays[name] for name in self.shapes]))


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of an nnx module or state, or of dictionaries and lists in each other, by dotted path and in
    jax.tree's order. Raises ValueError where two would have the same name."""
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(tree) if isinstance(tree, nnx.Module) else tree):
        keys = (getattr(entry, "key", getattr(entry, "idx", None)) for entry in path)
        name = ".".join(str(key) for key in keys if key is not None)
        if name in out:
            raise ValueError(f"two leaves have the name {name!r}")
        out[name] = leaf
    return out


def check_cover(shapes: Mapping[str, Any], parts: Parts) -> None:
    """Raises CheckpointError where a module's parts do not cover each parameter once."""
    for path in shapes.keys() ^ parts.keys():
        raise CheckpointError(f"parameter {path} is {'filled by no tensor' if path in shapes else 'not in the model'}")
    for path, of in parts.items():
        shape, depth = shapes[path].shape, len(of[0].at) if of else 0
        filled = dict.fromkeys(np.ndindex(shape[:depth]), 0)  # leading indices -> rows there
        for part in of:
            if part.at not in filled:
                raise CheckpointError(f"parameter {path}: {part.name} lies at {list(part.at)}, outside {list(shape)}")
            if part.start != (row := filled[part.at]):
                raise CheckpointError(f"parameter {path}: {part.name} starts at row {part.start}, not {row}")
            filled[part.at] = shape[depth] if part.stop is None else part.stop
        for at, row in filled.items():
            if row != shape[depth]:
                where = f" at {list(at)}" if at else ""
                raise CheckpointError(f"parameter {path}: its tensors fill {row} rows of {shape[depth]}{where}")


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that jax.device_put takes over on CPU."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
