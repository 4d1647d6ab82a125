"""Orbax checkpoints of a model: its parameters in weights/, config.json and the tokenizer's files beside it.

weights/ is an ordinary Orbax checkpoint of nested dictionaries, named as the module's parameters are, uncompressed
(weights hardly compress). Orbax writes it; reading goes through TensorStore straight into the memory that JAX takes
over, since Orbax' own restore holds a parameter up to three times.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.checkpoint.replace import SUFFIX, Replacement
from jaxoverlap.checkpoint.tree import Index, ParameterTree, aligned, named_leaves
from jaxoverlap.paths import bytes_below
from jaxoverlap.progress import Report, silent

WEIGHTS = "weights"
CHUNK = 8 << 20  # bytes; what one read brings in beside its destination
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
TRAVELLING = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
LEFT = ("*.safetensors.index.json", "stamp.json")  # these speak of files that do not come along
logger = logging.getLogger(__name__)


def is_orbax(directory: Path) -> bool:
    """Raises CheckpointError where the directory is what an interrupted save has left."""
    if (directory / WEIGHTS / "_METADATA").is_file():
        return True
    if any(directory.glob(f"{WEIGHTS}*")) and directory.name.endswith(SUFFIX):
        whole = directory.name.removesuffix(SUFFIX)
        raise CheckpointError(f"{directory}: the save of {whole} was interrupted, this is no whole checkpoint")
    if (left := next(directory.glob(f"{WEIGHTS}.orbax-checkpoint-tmp*"), None)) is not None:
        raise CheckpointError(f"{directory}: the save of {WEIGHTS} was interrupted, {left.name} is no whole checkpoint")
    return False


class Checkpoint:
    """An Orbax checkpoint for reading; a context manager. `shapes`: shape and stored dtype by parameter; `tensors`: see
    `save`.

    Also reads what Orbax itself wrote of an nnx state or of dictionaries, in any of its storage formats. Raises
    CheckpointError naming the parameter, or the file, that cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        import tensorstore

        self.directory = directory
        weights = (directory / WEIGHTS).absolute()
        layout = Fields.read(weights / "_METADATA")
        driver = "zarr3" if layout.boolean("use_zarr3", False) else "zarr"
        is_ocdbt = layout.boolean("use_ocdbt", False)
        notes = layout.group("custom_metadata") or Fields({}, "")
        self.tensors: dict[str, str] = (notes.group("tensors") or Fields({}, "")).values
        context, opening = tensorstore.Context(), {}
        for stored in _stored_names(layout):
            kvstore: dict[str, Any] = {"driver": "file", "path": f"{weights}/{'' if is_ocdbt else stored + '/'}"}
            if is_ocdbt:
                kvstore = {"driver": "ocdbt", "base": kvstore, "path": f"{stored}/"}
            name = stored.removesuffix(".value")  # an nnx state keeps each array under its variable's `value`
            spec = {"driver": driver, "kvstore": kvstore}
            opening[name] = tensorstore.open(spec, context=context, open=True, read=True)
        self._stores = {name: self._result(name, store) for name, store in opening.items()}
        self.shapes = {
            name: jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype) for name, store in self._stores.items()
        }

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stores.clear()

    def check(self, tree: ParameterTree, ignored: str = "$^") -> None:
        """Raises CheckpointError naming the first parameter that is missing, unknown, or of the wrong shape or
        dtype. (`ignored` is about safetensors.)"""
        for name, leaf in tree.shapes.items():
            where = f"{self.directory}: parameter {name}"
            if name not in self.shapes:
                raise CheckpointError(f"{where} is missing")
            there = self.shapes[name]
            if there.shape != leaf.shape:
                raise CheckpointError(f"{where} has shape {list(there.shape)}, the model needs {list(leaf.shape)}")
            if there.dtype not in DTYPES.values():
                names = ", ".join(str(dtype) for dtype in DTYPES.values())
                raise CheckpointError(f"{where} has dtype {there.dtype}, only {names} are read")
        for name in self.shapes:
            if name not in tree.shapes:
                raise CheckpointError(f"{self.directory}: parameter {name} is unknown to this model")

    def read(self, tree: ParameterTree, name: str, index: Index = ()) -> np.ndarray:
        """Parameter `name`, or this part of it, in the tree's dtype and in memory that jax.device_put takes over."""
        return self.array(name, tree.shapes[name].dtype, index)

    def array(self, name: str, dtype: Any, index: Index = ()) -> np.ndarray:
        """As `read`, in any dtype."""
        import tensorstore as ts

        store = self._stores[name]
        if index:
            store = store[index][ts.d[:].translate_to[0]]
        if store.dtype.numpy_dtype != dtype:
            store = ts.cast(store, dtype)
        out = aligned(store.shape, dtype)
        self._result(name, ts.array(out, copy=False).write(store))
        return out

    def _result(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, OSError, RuntimeError) as e:
            raise CheckpointError(f"{self.directory}: parameter {name} cannot be read: {e}") from None


def _stored_names(layout: Fields) -> list[str]:
    """Orbax' names of the arrays in a tree: the keys on the way, with dots."""
    leaves = layout.group("tree_metadata")
    if leaves is None:
        raise layout.error("tree_metadata", "is missing: no whole Orbax checkpoint")
    try:
        return [".".join(str(key["key"]) for key in leaf["key_metadata"]) for leaf in leaves.values.values()]
    except (KeyError, TypeError):
        raise layout.error("tree_metadata", "has leaves without key_metadata: no whole Orbax checkpoint") from None


class Saving:
    """A save on its way, in a thread of its own, which a process that ends waits for."""

    def __init__(self, checkpointer: Any, replacement: Replacement, total: int) -> None:
        self._checkpointer, self._replacement, self._total = checkpointer, replacement, total
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._finish, name="orbax save")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, progress: Report | None = None) -> None:
        """Returns when the checkpoint is at its place; raises what has made the save fail."""
        report, label, done = progress or silent, "saving", 0
        while not self.done:
            done = max(done, min(bytes_below(self._replacement.folder), self._total - 1))
            report(label, done, self._total)
            self._thread.join(0.1)
        if self._failure is not None:
            raise self._failure
        report(label, self._total, self._total)

    def _finish(self) -> None:
        try:
            with self._replacement, contextlib.closing(self._checkpointer):
                self._checkpointer.wait_until_finished()
        except BaseException as e:
            logger.error("the save of %s failed: %s", self._replacement.directory, e)  # `wait` may never be called
            self._failure = e


def save(directory: Path, weights: Any, *, files: Path, tensors: Mapping[str, str] | None = None) -> Saving:
    """Starts to save `weights`, a tree as `named_leaves` takes it, under `directory`, with the configuration and
    tokenizer of the model directory `files`; returns once they may be changed or donated.

    A former checkpoint at `directory` stays until the new one is whole. `tensors`: dtypes (BF16, F16, F32) of the
    safetensors that a conversion back shall write; without it, those of the parameters. NumPy arrays are copied, jax
    arrays are not. Raises CheckpointError where `directory` is something else than a checkpoint or is being written,
    and ValueError naming a leaf that is no array.
    """
    import orbax.checkpoint as ocp

    leaves = named_leaves(weights)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"parameter {name} must be an array, not a {type(leaf).__name__}")
    total = sum(leaf.nbytes for leaf in leaves.values())
    item = _nested(leaves)
    arguments = ocp.args.PyTreeSave(
        item,
        save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), item),
        custom_metadata={"tensors": dict(tensors or {})},
    )
    replacement = Replacement(directory)
    try:
        copy_files(files, replacement.folder)
        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        checkpointer.save(replacement.folder / WEIGHTS, args=arguments)
    except BaseException:
        replacement.abandon()
        raise
    return Saving(checkpointer, replacement, total)


def copy_files(source: Path, target: Path) -> None:
    """Configuration, tokenizer, chat template and licence: all that a model directory holds beside weights."""
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch.fnmatch(path.name, pattern) for pattern in TRAVELLING)
        if path.is_file() and wanted and not any(fnmatch.fnmatch(path.name, pattern) for pattern in LEFT):
            shutil.copyfile(path, target / path.name)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}"""
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split(".")
        inner = out
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = leaf
    return out
