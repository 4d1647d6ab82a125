"""`jaxoverlap replay`: its lines of JSON, and its refusal of bad files before anything starts."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from helpers_replay import TRACES, host_runner, raw, request

from jaxoverlap.cli import main
from jaxoverlap.replay.command import load_all, replay
from jaxoverlap.replay.play import play


class HostDevice:
    """ReplayDevice in NumPy; it must be warm while it plays, and shut down at the end."""

    open = 0

    def __init__(self, scenarios):
        assert scenarios
        self.is_warm = False
        HostDevice.open += 1

    def warm_up(self, progress):
        progress(1, 1, "step")
        self.is_warm = True

    def runner(self, config, scenario, rank):
        assert self.is_warm
        return host_runner(config, scenario, rank)

    def shutdown(self):
        HostDevice.open -= 1


@pytest.fixture
def host_device(monkeypatch):
    """The command line with a NumPy device, and no jax."""
    cache = SimpleNamespace(enable_compilation_cache=lambda path: None)
    monkeypatch.setitem(sys.modules, "jaxoverlap.device.compile_cache", cache)
    monkeypatch.setitem(sys.modules, "jaxoverlap.replay.device", SimpleNamespace(ReplayDevice=HostDevice))
    yield
    assert HostDevice.open == 0


def write(path, scenario):
    path.write_text(json.dumps({"scenario": scenario}))
    return str(path)


def test_a_line_of_json_for_each_file_in_their_order():
    files = [str(TRACES / f"{name}.json") for name in ("50_dp2_basic", "01_single_len4")]
    scenarios = load_all(files)
    out = io.StringIO()
    replay(scenarios, host_runner, out)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    for line, scenario in zip(lines, scenarios):
        assert ": " not in line
        data = json.loads(line)
        assert list(data) == ["name", "normal", "overlap"]
        assert data["name"] == scenario.name
        assert data["overlap"] == json.loads(json.dumps(play(scenario, True, host_runner)))
    assert [isinstance(json.loads(line)["normal"], list) for line in lines] == [True, False]


def test_a_recorded_trace_is_not_needed(tmp_path):
    file = write(tmp_path / "mine.json", raw((0, "request", request("a"))))
    out = io.StringIO()
    replay(load_all([file]), host_runner, out)
    assert json.loads(out.getvalue())["normal"]["finished"] == {"a": "length"}


def test_bad_files_are_all_named_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxoverlap.replay.command.record", lambda *a, **k: pytest.fail("something was played"))
    good = write(tmp_path / "good.json", raw((0, "request", request("a"))))
    wrong = write(tmp_path / "wrong.json", raw((0, "request", request("a", n=300))))
    gone = str(tmp_path / "gone.json")
    assert main(["replay", good, wrong, gone]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{wrong}: ops[0].prompt_ids: 300 tokens" in said.err
    assert f"{gone}: No such file" in said.err
    assert "good.json" not in said.err


def test_departures_reach_the_scheduler(host_device, capsys):
    def played(name, *flags):
        assert main(["replay", str(TRACES / f"{name}.json"), *flags]) == 0
        return json.loads(capsys.readouterr().out)

    assert played("02_max_new_1")["overlap"]["forward_steps"] == 4
    assert played("02_max_new_1", "--overrun", "skip-known")["overlap"]["forward_steps"] == 2
    turns = [played("62_mixed_env_on", *flags)["overlap"]["turns"] for flags in ((), ("--no-strict-aliasing",))]
    assert [[t["turn"] for t in x if t.get("overlap_disabled")] for x in turns] == [[], [3, 4]]
    text = "12_stop_and_length_same_step"
    assert played(text)["overlap"]["finished"] != played(text, "--finish-order", "stop-first")["overlap"]["finished"]


def test_show_and_explain_print_text_only(host_device, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["replay", str(TRACES / "01_single_len4.json"), "--show", "--explain"]) == 0
    page = capsys.readouterr().out
    assert "a joins: 5 tokens, 0 cached" in page
    assert "order     run1" in page
    assert max(map(len, page.splitlines())) == 160
    assert "{" not in page


def test_without_a_file_it_says_what_it_needs(capsys):
    with pytest.raises(SystemExit) as e:
        main(["replay"])
    assert e.value.code == 2
    assert "SCENARIO.json" in capsys.readouterr().err
