"""The recorded traces of SGLang's scheduler on the PyTorch runner, its pages and its FutureMap (on the CPU)."""

import json
from pathlib import Path

import pytest
from compare import difference

from jaxoverlap.replay.play import play
from jaxoverlap.replay.scenario import load_scenario

pytest.importorskip("torch", reason="needs torch")

from jaxoverlap.replay.torch_device import make_runner

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_trace(path, loop):
    recorded = json.loads(path.read_text())
    got = play(load_scenario(path), loop == "overlap", make_runner, audit=True)
    assert difference(recorded[loop], json.loads(json.dumps(got))) is None
