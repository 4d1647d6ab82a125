"""A Hugging Face directory's safetensors, read as a model's parameters.

Every tensor of the checkpoint is used exactly once and every parameter filled exactly once, or CheckpointError names
the offender.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.checkpoint.tree import Index, ParameterTree, aligned

INDEX = "model.safetensors.index.json"
DTYPES = ("BF16", "F16", "F32")
INTEGERS = ("I64", "I32")  # of parameters that hold ids


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

    def check(self, tree: ParameterTree, ignored: str = "$^") -> None:
        """`ignored` is a pattern of whole tensor names that are left aside. Raises CheckpointError naming the first
        tensor that is missing, unknown, or of the wrong shape or dtype."""
        wanted = {piece.tensor: (piece.shape, path) for path in tree.parts for piece in tree.pieces(path)}
        if len(wanted) != sum(len(of) for of in tree.parts.values()):
            raise CheckpointError("a tensor is wanted by two parameters")
        for name, (shape, path) in wanted.items():
            if name not in self.where:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing")
            integer = np.issubdtype(tree.shapes[path].dtype, np.integer)
            self._check_tensor(name, shape, INTEGERS if integer else DTYPES)
        for name, file in self.where.items():
            if name in wanted or re.fullmatch(ignored, name):
                continue
            if name not in tree.duplicates:
                raise CheckpointError(f"{file}: tensor {name} is unknown to this model")
            twin = tree.duplicates[name]
            self._check_tensor(name, self.shape(twin))
            if not np.array_equal(self.tensor(name), self.tensor(twin)):
                raise CheckpointError(f"{file}: tensor {name} differs from {twin}, but config.json ties the two")

    def _check_tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = DTYPES) -> None:
        where = f"{self.where[name]}: tensor {name}"
        if self.shape(name) != shape:
            raise CheckpointError(f"{where} has shape {list(self.shape(name))}, the model needs {list(shape)}")
        if self.dtype(name) not in dtypes:
            raise CheckpointError(f"{where} has dtype {self.dtype(name)}, only {', '.join(dtypes)} are read")

    def read(self, tree: ParameterTree, name: str, index: Index = ()) -> np.ndarray:
        """Parameter `name`, or this part of it, in the tree's dtype and in memory that jax.device_put takes over."""
        leaf = tree.shapes[name]
        out = aligned(leaf.shape, leaf.dtype)
        for piece in tree.pieces(name):
            out[piece.index] = self.tensor(piece.tensor)
        return out[index]


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
        raise CheckpointError(f"{directory}: holds no *.safetensors file and no Orbax checkpoint (weights/)")
    return found
