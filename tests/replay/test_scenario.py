"""Scenario files: what is read, and what is refused by which words."""

import json

import pytest
from helpers_replay import TRACES, raw, request

from jaxoverlap.replay.scenario import ScenarioError, load_scenario, parse_scenario


def test_a_scenario_reads_as_written():
    s = parse_scenario(
        raw(
            (1, "request", request("a", grammar=3)),
            (2, "abort", {"rid": "a"}),
            force={"a": {"2": 7}},
            page_size=4,
            speculative={"num_steps": 2, "topk": 1, "num_draft_tokens": 3},
        )
        | {"grammar_compile_turns": 2, "idle_tail": 1, "max_turns": 9}
    )
    assert (s.name, s.force, s.grammar_compile_turns, s.idle_tail, s.max_turns) == ("mine", {"a": {2: 7}}, 2, 1, 9)
    assert [op["op"] for op in s.ops] == ["request", "abort"]
    config = s.engine_config(overlap=False, audit=True)
    assert (config.page_size, config.max_total_tokens) == (4, 256)
    assert (config.speculative_num_steps, config.speculative_num_draft_tokens) == (2, 3)
    assert config.disable_overlap_schedule
    assert config.audit
    assert not s.engine_config(overlap=True).disable_overlap_schedule


def test_only_the_scenario_of_a_file_is_read(tmp_path):
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"scenario": raw((0, "request", request("a"))), "normal": "anything", "more": [1]}))
    assert load_scenario(file).name == "mine"


def test_every_recorded_scenario_is_accepted():
    assert {load_scenario(p).name for p in TRACES.glob("*.json")} == {p.stem for p in TRACES.glob("*.json")}


def op(**fields):
    base = {"at": 0, "op": "request", **request("a")}
    return raw() | {"ops": [{k: v for k, v in (base | fields).items() if v is not ...}]}


WRONG = {
    "scenario.name: missing": {k: v for k, v in raw().items() if k != "name"},
    "scenario.ops: missing": {k: v for k, v in raw().items() if k != "ops"},
    "scenario.ops: must be a list, not {}": raw() | {"ops": {}},
    "scenario: unknown field 'opps'": raw() | {"opps": []},
    "scenario.max_turns: must be an integer of at least 0, not -1": raw() | {"max_turns": -1},
    "config: unknown setting 'page_sizes'": raw(page_sizes=4),
    "config: page_size must be at least 1, not 0": raw(page_size=0),
    "config: schedule_policy must be one of fcfs, lpm": raw(schedule_policy="best"),
    "config: max_running_requests must be a int, not '4'": raw(max_running_requests="4"),
    "config.max_total_tokens: missing": raw() | {"config": {"max_running_requests": 4}},
    "config.speculative.num_steps: missing": raw(speculative={"topk": 1, "num_draft_tokens": 3}),
    "config.speculative: unknown field 'k'": raw(speculative={"k": 1}),
    "config: speculative_eagle_topk must be 1": raw(speculative={"num_steps": 2, "topk": 4, "num_draft_tokens": 3}),
    "force.a: must be an object from output indices below 4096 to tokens below 1000": raw(force={"a": {"0": 1000}}),
    "ops[0].op: must be one of request, abort, pause, continue": op(op="stop"),
    "ops[0].at: missing": op(at=...),
    "ops[0].at: must be an integer of at least 0, not True": op(at=True),
    "ops[0].rid: missing": op(rid=...),
    "ops[0].prompt_ids: must be a non-empty list of tokens below 1000, not []": op(prompt_ids=[]),
    "ops[0].prompt_ids: must be a non-empty list of tokens below 1000, not [5, -1]": op(prompt_ids=[5, -1]),
    "ops[0].prompt_ids: 250 tokens, but at most 249 are admitted": op(prompt_ids=[5] * 250),
    "ops[0].max_new_tokens: must be an integer of at least 0, not '3'": op(max_new_tokens="3"),
    "ops[0]: stop must not hold an empty string": op(stop=[""]),
    "ops[0]: stop_token_ids must be a list of ints, not int": op(stop_token_ids=2),
    "ops[0].grammar: must be an integer of at least 0, not 'json'": op(grammar="json"),
    "ops[0].rank: must be below dp_size 1, not 1": op(rank=1),
    "ops[0]: unknown field 'temperature'": op(temperature=0.5),
    "ops[0]: an abort has either rid or all": raw((0, "abort", {})),
    "ops[1]: an abort has either rid or all": raw((0, "abort", {"rid": "a"}), (0, "abort", {"rid": "a", "all": True})),
    "ops[0].mode: must be in_place, retract or abort, not 'soft'": raw((0, "pause", {"mode": "soft"})),
    "ops[0].mode: missing": raw((0, "pause", {})),
    "ops[0]: unknown field 'mode'": raw((0, "continue", {"mode": "abort"})),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_is_named_with_its_file(message, tmp_path):
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps({"scenario": WRONG[message]}))
    with pytest.raises(ScenarioError) as e:
        load_scenario(file)
    assert str(e.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no object 'scenario' in it"),
        ('{"scenario": 3}', "no object 'scenario' in it"),
        ('{"normal": {}}', "no object 'scenario' in it"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_file_without_a_scenario(text, message, tmp_path):
    file = tmp_path / "wrong.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ScenarioError, match=message):
        load_scenario(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ScenarioError, match=r"gone\.json: No such file"):
        load_scenario(tmp_path / "gone.json")


def test_a_long_value_is_cut_short_in_the_message(tmp_path):
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps({"scenario": op(prompt_ids=[5] * 5000 + [-1])}))
    with pytest.raises(ScenarioError) as e:
        load_scenario(file)
    assert len(str(e.value)) < 300
