"""A Hugging Face directory's safetensors, straight into a model's parameters.

Every tensor of the checkpoint is used exactly once and every parameter filled exactly once, or CheckpointError names
the offender. One parameter at a time is in memory beside what is already placed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.checkpoint.parts import Part, Parts
from jaxoverlap.progress import Report, silent

INDEX = "model.safetensors.index.json"
DTYPES = ("BF16", "F16", "F32")
ALIGNMENT = 64  # bytes; the CPU backend takes such memory over without a copy


class Checkpoint:
    """The tensors of a directory's safetensors files; a context manager that holds them open (memory-mapped).

    With an index, the files that it names; else model.safetensors; else every *.safetensors but Mistral's
    consolidated ones. Raises CheckpointError naming a file that is absent or not whole, and a tensor held twice.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}  # tensor -> open file
        self.where: dict[str, Path] = {}  # tensor -> file
        index = _index(directory)
        for path in _file_list(directory, index):
            self._open(path)
        for name, file in (index or {}).items():
            if name not in self.where:
                raise CheckpointError(f"{directory / file}: tensor {name} is missing, {INDEX} says that it is there")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.clear()
        self._stack.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="numpy"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (SafetensorError, OSError) as e:
            size = path.stat().st_size if path.is_file() else 0
            raise CheckpointError(f"{path}: not a whole safetensors file ({size} bytes): {e}") from None
        for name in file.keys():  # noqa: SIM118
            if name in self.where:
                raise CheckpointError(f"tensor {name} is in {self.where[name].name} and in {path.name}")
            self.where[name] = path
            self._files[name] = file

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of it: BF16, F16, F32 ..."""
        return self._files[name].get_slice(name).get_dtype()

    def tensor(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


def _index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX
    if not path.exists():
        return None
    fields = Fields.read(path)
    weight_map = fields.values.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise fields.error("weight_map", "must map tensor names to file names")
    for file in set(weight_map.values()):
        if not (directory / file).is_file():
            raise CheckpointError(f"{path} names {file}, which is absent")
    return weight_map


def _file_list(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        return [directory / file for file in sorted(set(index.values()))]
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    found = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not found:
        raise CheckpointError(f"{directory}: holds no *.safetensors file (no other format is read)")
    return found


def load_parameters(
    build: Callable[[], Any], directory: Path, *, ignored: str = "$^", progress: Report | None = None
) -> Any:
    """The module that `build` makes, its parameters taken from `directory` in the dtypes that the module states.

    The module says what it is made of: `parts()`, and `duplicates()` for tensors that may repeat another. `ignored`
    is a pattern of whole tensor names that are left aside. Raises CheckpointError naming a tensor that is missing,
    unknown, of the wrong shape or dtype.
    """
    module = nnx.eval_shape(build)
    graph, state = nnx.split(module)
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    shapes = {".".join(str(k.key) for k in path if hasattr(k, "key")): leaf for path, leaf in leaves}
    parts: Parts = module.parts()
    check_cover(shapes, parts)
    with Checkpoint(directory) as checkpoint:
        check_tensors(checkpoint, shapes, parts, module.duplicates(), ignored)
        report, arrays = progress or silent, []
        total = sum(leaf.size for leaf in shapes.values())
        done = 0
        for path, leaf in shapes.items():
            arrays.append(jax.device_put(_read(checkpoint, leaf, parts[path])))
            done += leaf.size
            report("loading weights", done, total)
    return nnx.merge(graph, jax.tree.unflatten(tree, arrays))


def check_cover(shapes: dict[str, Any], parts: Parts) -> None:
    """Raises CheckpointError where a module's parts do not cover each parameter's rows once."""
    for path in shapes.keys() ^ parts.keys():
        raise CheckpointError(f"parameter {path} is {'filled by no tensor' if path in shapes else 'not in the model'}")
    for path, of in parts.items():
        row = 0
        for part in of:
            if part.start != row:
                raise CheckpointError(f"parameter {path}: {part.name} starts at row {part.start}, not {row}")
            row = shapes[path].shape[0] if part.stop is None else part.stop
        if row != shapes[path].shape[0]:
            raise CheckpointError(f"parameter {path}: its tensors fill {row} rows of {shapes[path].shape[0]}")


def check_tensors(
    checkpoint: Checkpoint, shapes: dict[str, Any], parts: Parts, duplicates: dict[str, str], ignored: str
) -> None:
    """Raises CheckpointError naming the first tensor that is missing, unknown, or of the wrong shape or dtype."""
    wanted = {part.name: (part, shapes[path]) for path, of in parts.items() for part in of}
    if len(wanted) != sum(len(of) for of in parts.values()):
        raise CheckpointError("a tensor is wanted by two parameters")
    for name, (part, leaf) in wanted.items():
        if name not in checkpoint.where:
            raise CheckpointError(f"{checkpoint.directory}: tensor {name} is missing")
        rows = (leaf.shape[0] if part.stop is None else part.stop) - part.start
        _check_tensor(checkpoint, name, (rows, *leaf.shape[1:]))
    for name, path in checkpoint.where.items():
        if name in wanted or re.fullmatch(ignored, name):
            continue
        if name not in duplicates:
            raise CheckpointError(f"{path}: tensor {name} is unknown to this model")
        twin = duplicates[name]
        _check_tensor(checkpoint, name, checkpoint.shape(twin))
        if not np.array_equal(checkpoint.tensor(name), checkpoint.tensor(twin)):
            raise CheckpointError(f"{path}: tensor {name} differs from {twin}, but config.json ties the two")


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    where = f"{checkpoint.where[name]}: tensor {name}"
    if checkpoint.shape(name) != shape:
        raise CheckpointError(f"{where} has shape {list(checkpoint.shape(name))}, the model needs {list(shape)}")
    if checkpoint.dtype(name) not in DTYPES:
        raise CheckpointError(f"{where} has dtype {checkpoint.dtype(name)}, only {', '.join(DTYPES)} are read")


def _read(checkpoint: Checkpoint, leaf: Any, of: tuple[Part, ...]) -> np.ndarray:
    out = _aligned(leaf.shape, leaf.dtype)
    for part in of:
        out[part.start : part.stop] = checkpoint.tensor(part.name)
    return out


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)
