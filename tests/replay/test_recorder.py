"""What the recorder writes down, where the recorded traces do not say it already."""

import pytest
from helpers_replay import host_runner, request, scenario

from jaxoverlap.core import FinishReason
from jaxoverlap.replay.play import play, record, trace_of
from jaxoverlap.replay.recorder import reason_text


def test_reasons_do_not_enter_the_trace():
    s = scenario((0, "request", request("a")))
    recorders = record(s, True, host_runner)
    assert any(recorders[0].reasons)
    assert len(recorders[0].reasons) == len(recorders[0].turns)
    fields = {name for turn in trace_of(recorders)["turns"] for name in turn}
    assert fields <= {"turn", "batch", "order", "committed", "finished", "dropped", "stream", "end"}


def test_one_rank_gives_a_trace_and_two_give_a_list():
    assert isinstance(play(scenario((0, "request", request("a"))), True, host_runner), dict)
    two = play(scenario((0, "request", request("a", rank=1)), dp_size=2), True, host_runner)
    assert [t["outputs"].keys() for t in two] == [set(), {"a"}]
    assert two[0]["forward_steps"] == two[1]["forward_steps"]


def test_the_run_ends_after_the_idle_tail():
    """A request of 1 token: normal runs it in turn 2; then 3 idle turns, and none before the last op came."""
    s = scenario((2, "request", request("a", max_new_tokens=1)))
    turns = play(s, False, host_runner)["turns"]
    assert [t["turn"] for t in turns] == list(range(len(turns)))
    assert [bool(t.get("batch")) for t in turns] == [False, False, True, False, False, False]


def test_settings_beside_the_scenarios_own():
    s = scenario((0, "request", request("a", max_new_tokens=4)))
    assert play(s, True, host_runner)["forward_steps"] == 5
    assert play(s, True, host_runner, overrun="skip-known")["forward_steps"] == 4


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (FinishReason("length", length=4), "length"),
        (FinishReason("stop", matched=2), "stop:2"),
        (FinishReason("stop", matched="<7>"), "stop:<7>"),
        (FinishReason("abort", message="x"), "abort"),
    ],
)
def test_how_an_end_is_written(reason, text):
    assert reason_text(reason) == text
