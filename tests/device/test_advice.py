import pytest

from jaxoverlap.cli import main
from jaxoverlap.device import advice as module
from jaxoverlap.device.advice import SetupWarning, advice, warn


@pytest.fixture
def dev(tmp_path):
    for name in ("nvidia0", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


def found(dev, has_plugin=True, **environ):
    return advice(environ, devices=dev, has_plugin=has_plugin)


def test_nothing_to_say(dev, tmp_path):
    assert found(dev) == []
    assert found(dev, JAX_PLATFORMS="cuda,cpu") == []
    assert found(dev, JAX_PLATFORMS="cpu", has_plugin=False) == []
    assert found(dev, XLA_FLAGS="--xla_gpu_enable_command_buffer=FUSION,CUBLAS --xla_dump_to=x") == []
    (tmp_path / "none").mkdir()
    flags = "--xla_gpu_enable_command_buffer="
    assert found(tmp_path / "none", has_plugin=False, XLA_FLAGS=flags, JAX_PLATFORMS="cuda") == []


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_without_the_plugin(dev, hidden):
    (text,) = found(dev, has_plugin=False)
    assert "pip install 'jaxoverlap[cuda]'" in text
    assert found(dev, has_plugin=False, CUDA_VISIBLE_DEVICES="0") == [text]
    assert found(dev, has_plugin=False, CUDA_VISIBLE_DEVICES=hidden) == []


@pytest.mark.parametrize("flag", ["=", "=''", '=""', "= --xla_dump_to=x", "=FUSION --xla_gpu_enable_command_buffer="])
def test_cuda_graphs_switched_off(dev, flag):
    (text,) = found(dev, XLA_FLAGS=f"--xla_gpu_enable_command_buffer{flag}")
    assert "take the flag out" in text


def test_a_hidden_host(dev):
    (text,) = found(dev, JAX_PLATFORMS="cuda")
    assert "set JAX_PLATFORMS=cuda,cpu" in text


def test_warnings_and_env(monkeypatch, capsys):
    monkeypatch.setattr(module, "advice", lambda environ: ["this costs that: do so"])
    with pytest.warns(SetupWarning, match="this costs that: do so"):
        warn({})
    assert main(["env"]) == 0
    assert "this costs that: do so" in capsys.readouterr().out
