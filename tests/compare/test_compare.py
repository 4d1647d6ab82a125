import dataclasses
import json

import numpy as np
import pytest
from helpers_engine import host_engine, oracle
from rich.console import Console

from jaxoverlap import cli
from jaxoverlap.compare import command, measure
from jaxoverlap.compare.measure import Comparison, Run, both_loops, compare, difference
from jaxoverlap.compare.report import figures, show, verdict
from jaxoverlap.core import RequestError
from jaxoverlap.progress import silent
from jaxoverlap.trace.events import Trace

PROMPTS = [[5, 6, 7], [8], list(range(20, 50))]
PARAMS = {"max_new_tokens": 6, "temperature": 0.0}


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([1, 2], [1, 3], {"request": 4, "position": 1, "expected": 2, "got": 3}),
        ([1, 2], [1], {"request": 4, "position": 1, "expected": 2, "got": None}),
        ([], [9], {"request": 4, "position": 0, "expected": None, "got": 9}),
    ],
)
def test_difference(a, b, want):
    assert difference(4, a, b) == want


def test_the_engines_differ_in_the_loop_alone():
    with host_engine(page_size=2, chunked_prefill_size=32) as base:
        engines = both_loops(base)
        assert all(e.runner.inner is base.runner and e.model is base.model for e in engines.values())
        for loop, engine in engines.items():
            off = loop == "normal"
            assert engine.config == dataclasses.replace(base.config, disable_overlap_schedule=off)


def test_a_comparison():
    told = []
    with host_engine() as base:
        comparison = compare(both_loops(base), PROMPTS, PARAMS, 2, lambda *args: told.append(args))
    want = [oracle(p, 6) for p in PROMPTS]
    for runs in comparison.runs.values():
        assert [run.output_ids for run in runs] == [want, want]
        for run in runs:
            assert all(0 < t <= run.wall for t in run.first_token)
            assert len(run.first_token) == 3
            assert run.tokens_per_s == pytest.approx(18 / run.wall)
    assert [done for _, done, _ in told] == [0, 1, 2, 3, 4]
    # a pass finds nothing that another has cached: every prompt token is computed anew each time
    extended = [int(x.extend_lens.sum()) for x in base.runner.launches if x.mode.is_extend]
    assert sum(extended) == sum(map(len, PROMPTS)) * (2 + 4)
    data = figures(comparison)
    assert data["tokens_equal"] is True
    assert (data["requests"], data["prompt_tokens"], data["output_tokens"], data["repeats"]) == (3, 34, 18, 2)
    assert data["loops"]["normal"]["launches"] < data["loops"]["overlap"]["launches"]
    assert json.loads(json.dumps(data)) == data


def differing():
    runs = {"normal": [[[1, 2]], [[1, 2]]], "overlap": [[[1, 2]], [[1, 5]]]}
    made = {k: [Run(ids, [0.1], 1.0, Trace()) for ids in v] for k, v in runs.items()}
    return Comparison([[9]], made)


def test_the_first_difference_is_reported():
    data = {"model": "m", "device": "d", **figures(differing())}
    assert data["tokens_equal"] is False
    want = {"request": 0, "position": 1, "expected": 2, "got": 5, "loop": "overlap", "repeat": 1}
    assert data["first_difference"] == want
    text = verdict(data)
    for part in ("differ", "request 0", "token 1", "2 in", "5 in overlap run 2"):
        assert part in text


def test_a_run_that_differs_from_its_own_loop_is_found():
    comparison = differing()
    comparison.runs["normal"], comparison.runs["overlap"] = comparison.runs["overlap"], comparison.runs["normal"]
    assert comparison.first_difference["loop"] == "normal"


def test_a_prompt_that_does_not_fit_is_named():
    with host_engine() as base, pytest.raises(RequestError, match="122 tokens"):
        compare(both_loops(base), [[5], [5] * 122], PARAMS, 1, silent)


def test_what_is_shown(capsys):
    with host_engine() as base:
        comparison = compare(both_loops(base), PROMPTS, PARAMS, 1, silent)
    data = {"model": "m", "device": "d", **figures(comparison)}
    show(Console(width=100, force_terminal=False), comparison, data)
    out = capsys.readouterr().out
    for part in (
        "decode step p50 / p90",
        "host work per step",
        "wait for the device",
        "hidden",
        "tokens/s",
        "first token",
    ):
        assert part in out
    assert "tokens equal: 3 requests, 18 tokens" in out
    lines = out.splitlines()
    assert sum(line.startswith("host    ") for line in lines) == 2
    assert sum(line.startswith("device  ") for line in lines) == 2
    assert max(map(len, lines)) <= 100


ARGS = ["compare", "--model", "checksum", "--max-new-tokens", "5", "--repeats", "1", "--context-length", "128"]
ARGS += ["--max-total-tokens", "512", "--chunked-prefill-size", "16", "--batch", "2"]


@pytest.fixture
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JAXOVERLAP_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def test_json_on_stdout_and_nothing_else(cache, capsys, tmp_path):
    assert cli.main([*ARGS, "--json", "-", "--timeline", str(tmp_path / "t.png")]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data["tokens_equal"] is True
    assert data["requests"] == 2
    for loop in measure.LOOPS:
        assert data["loops"][loop]["step_ms"]["p50"] > 0
        assert data["loops"][loop]["ttft_ms"]["p50"] > 0
        assert data["loops"][loop]["tokens_per_s"]["median"] > 0
    assert "tokens equal" in err
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_different_tokens_are_exit_code_1(cache, capsys, monkeypatch):
    whole = measure.run

    def wrong(engine, prompts, params):
        run = whole(engine, prompts, params)
        if not engine.config.disable_overlap_schedule:
            run.output_ids[1][2] += 1
        return run

    monkeypatch.setattr(measure, "run", wrong)
    assert cli.main([*ARGS, "--prompt-len", "7"]) == 1
    out = capsys.readouterr().out
    assert "tokens differ: request 1, output token 2" in out


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--timeline", "x.svg"], "x.svg"),
        (["--timeline", "/no/such/x.png"], "/no/such"),
        (["--json", "/no/such/x.json"], "/no/such"),
        (["--prompts", "/no/such/file"], "/no/such/file"),
        (["--temperature", "-1"], "--temperature"),
        (["--page-size", "0"], "page_size"),
        (["--prompt", "hello"], "no tokenizer"),
    ],
)
def test_mistakes_are_named(cache, capsys, flags, part):
    assert cli.main([*ARGS, *flags]) in (1, 2)
    assert part in capsys.readouterr().err


def test_the_normal_loop_alone_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("JAXOVERLAP_DISABLE_OVERLAP_SCHEDULE", "1")
    assert cli.main(ARGS) == 2
    assert "JAXOVERLAP_DISABLE_OVERLAP_SCHEDULE" in capsys.readouterr().err


def test_prompts_from_files(tmp_path):
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\n two\n")
    assert command.read_prompts(lines) == ["one", " two"]
    jsonl = tmp_path / "p.jsonl"
    jsonl.write_text('{"prompt": "a"}\n{"question": "b"}\n"c"\n')
    assert command.read_prompts(jsonl) == ["a", "b", "c"]
    for bad, part in [('{"prompt": 3}', "line 2"), ("{", "line 2"), ("[]", "line 2")]:
        jsonl.write_text(f'"ok"\n{bad}\n')
        with pytest.raises(cli.UsageError, match=part):
            command.read_prompts(jsonl)
    lines.write_text("\n")
    with pytest.raises(cli.UsageError, match="no prompt"):
        command.read_prompts(lines)


@pytest.mark.demo
@pytest.mark.soak
def test_the_demo_model(demo_model, capsys):
    assert cli.main(["compare", "--batch", "4", "--max-new-tokens", "12", "--repeats", "1", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tokens_equal"] is True
    assert np.isfinite(data["loops"]["overlap"]["step_ms"]["p50"])


@pytest.mark.parametrize(
    "device", [pytest.param([], marks=pytest.mark.soak), ["--device", "simulated", "--step-ms", "1"]]
)
def test_two_ranks(capsys, device):
    argv = [
        "compare",
        "--model",
        "checksum",
        "--dp-size",
        "2",
        "--enable-dp-attention",
        "--prompt-len",
        "8",
        "--batch",
        "3",
    ]
    argv += ["--max-new-tokens", "6", "--repeats", "1", "--max-total-tokens", "256", "--context-length", "64"]
    assert cli.main([*argv, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tokens_equal"] is True
    for loop in measure.LOOPS:
        told = data["loops"][loop]
        assert told["decode_steps"] >= 5
        assert sum(told["bubbles_ms"].values()) == pytest.approx(told["idle_ms"])


@pytest.mark.soak
def test_speculative_drafts_beside_none(capsys):
    argv = ["compare", "--model", "checksum", "--speculative", "ngram", "--prompt-len", "8", "--batch", "3"]
    argv += ["--max-new-tokens", "6", "--repeats", "1", "--max-total-tokens", "256", "--context-length", "64"]
    assert cli.main([*argv, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    drafts = data["speculative"]
    assert drafts["same_tokens"]
    assert drafts["tokens_equal"]
    assert "accept_rates" not in data["loops"]["normal"]
    for loop in drafts["loops"].values():
        assert len(loop["accept_rates"]) == 3
        assert loop["tokens_a_verify_step"] == pytest.approx(1 + sum(loop["accept_rates"]))


def test_drafts_that_cannot_be_made(capsys):
    for extra, part in (
        (["--speculative", "draft"], "speculative_draft_layers"),
        (["--speculative", "ngram", "--speculative-draft-layers", "3"], "speculative_draft_layers needs"),
        (["--speculative-num-draft-tokens", "3"], "needs speculative_algorithm"),
    ):
        assert cli.main(["compare", "--model", "checksum", *extra]) == 2
        assert part in capsys.readouterr().err
