"""A folder that is written beside another and takes its place, all at once, when it is whole."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from pathlib import Path

from jaxoverlap.checkpoint.errors import CheckpointError

SUFFIX = ".partial"
_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_RENAME_EXCHANGE = 2


class Replacement:
    """`folder`, empty at first, beside the checkpoint at `directory`, whose place it takes at `commit`.

    As a context manager it commits at the end of the block, or abandons where the block fails; until then what is at
    `directory` stays as it is. What a killed process leaves is NAME.partial, which the next one clears. Raises
    CheckpointError where `directory` is something else than a checkpoint, or somebody else is writing it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        if self.directory.exists() and not _is_replaceable(self.directory):
            raise CheckpointError(f"{directory} exists and is no checkpoint: it is not replaced")
        self.folder = partial_of(self.directory)
        self._lock = _lock(self.folder)
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def commit(self) -> None:
        if not self.directory.exists():
            os.rename(self.folder, self.directory)
        else:
            if not _exchange(self.folder, self.directory):
                former = self.directory.with_name(self.directory.name + ".former")
                os.rename(self.directory, former)
                os.rename(self.folder, self.directory)
                os.rename(former, self.folder)
            shutil.rmtree(self.folder)
        os.close(self._lock)

    def abandon(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.commit() if kind is None else self.abandon()


def partial_of(directory: Path) -> Path:
    """Where what becomes `directory` is written."""
    return directory.with_name(directory.name + SUFFIX)


def _is_replaceable(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    if not any(directory.iterdir()):
        return True
    return (directory / "config.json").is_file() and (
        (directory / "weights").is_dir() or any(directory.glob("*.safetensors"))
    )


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock, which ends with the process; the folder is made where it is absent."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(folder) and os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(f"{folder.name.removesuffix(SUFFIX)} is being written: {folder} is locked") from None
        os.close(descriptor)  # it was moved to its place meanwhile


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one step; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return done == 0
