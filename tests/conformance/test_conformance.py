"""The recorded traces of SGLang's scheduler on the JAX runner: the real loops, scheduler and memory, tokens going
through the FutureMap and the page table on the device. One padded shape serves all of them."""

import json
from pathlib import Path

import pytest
from compare import difference

from jaxoverlap.replay.device import ReplayDevice
from jaxoverlap.replay.play import play
from jaxoverlap.replay.scenario import load_scenario

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))


@pytest.fixture(scope="module")
def device():
    device = ReplayDevice([load_scenario(path) for path in TRACES])
    device.warm_up()
    yield device
    device.shutdown()


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_trace(path, device):
    recorded = json.loads(path.read_text())
    for loop in ("normal", "overlap"):
        got = play(load_scenario(path), loop == "overlap", device.runner, audit=True)
        assert difference(recorded[loop], json.loads(json.dumps(got))) is None, loop


def test_a_hundred_traces_take_one_start_and_a_handful_of_compiles(device):
    before = device.compiles
    assert before <= 15
    for path in TRACES[:10]:
        play(load_scenario(path), True, device.runner)
    assert device.compiles == before
