"""The recorded traces, with a NumPy device in place of the JAX one: the scheduler alone, audited after every turn."""

import json
import sys
from pathlib import Path

import pytest
from host_runner import HostRunner

from jaxoverlap.replay.play import play
from jaxoverlap.replay.scenario import CONTEXT_LENGTH, load_scenario

CONFORMANCE = Path(__file__).parents[1] / "conformance"
sys.path.insert(0, str(CONFORMANCE))

from compare import difference  # noqa: E402

TRACES = sorted((CONFORMANCE / "traces").glob("*.json"))


def make_runner(config, scenario, rank):
    pages = config.max_total_tokens // config.page_size
    drafts = config.speculative_num_draft_tokens
    return HostRunner(
        config.max_running_requests + 1, CONTEXT_LENGTH, pages, config.page_size, scripts=scenario.force, drafts=drafts
    )


def test_all_traces_are_here():
    assert len(TRACES) == 100


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_trace(path, loop):
    want = json.loads(path.read_text())[loop]
    got = play(load_scenario(path), loop == "overlap", make_runner, audit=True)
    assert difference(want, json.loads(json.dumps(got))) is None
