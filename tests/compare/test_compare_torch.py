"""`jaxoverlap compare --runner jax,torch`: the four combinations on one load."""

import importlib.util
import json
from pathlib import Path

import pytest
from helpers_models import make_hf_dir

from jaxoverlap import cli
from jaxoverlap.compare import runners
from jaxoverlap.compare.measure import Comparison, Run, all_loops, compare
from jaxoverlap.compare.report import MARGIN, agrees, figures, same_tokens, schedule_verdict
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.progress import silent
from jaxoverlap.trace.events import Trace

NAMES = ["jax normal", "jax overlap", "torch normal", "torch overlap"]
LENGTHS = ["--context-length", "96", "--max-total-tokens", "320", "--chunked-prefill-size", "16", "--batch", "3"]
FLAGS = ["--repeats", "1", "--max-new-tokens", "6", "--json", "-", *LENGTHS]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@needs_torch
@pytest.mark.parametrize("timeline", ["t.png", "t.json"])
def test_four_combinations(tmp_path, capsys, timeline):
    model = make_hf_dir(tmp_path / "m")
    out = tmp_path / timeline
    flags = ["--model", str(model), "--dtype", "float32", "--runner", "jax,torch", "--timeline", str(out)]
    assert cli.main(["compare", *flags, *FLAGS, "--temperature", "0.8"]) == 0
    stdout, stderr = capsys.readouterr()
    data = json.loads(stdout)
    assert list(data["loops"]) == NAMES
    assert data["tokens_equal"] is True
    assert data["schedules_equal"] is True
    assert data["loops"]["jax overlap"]["launches"] == data["loops"]["torch overlap"]["launches"]
    assert data["loops"]["torch overlap"]["hidden"] == 0.0  # computed inside the launch call
    for part in (*NAMES, "schedules equal", "gap between", "overlap gains nothing"):
        assert part in stderr
    if timeline == "t.json":
        events = json.loads(out.read_text())["traceEvents"]
        assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == NAMES
    else:
        assert out.stat().st_size > 1000


@needs_torch
def test_bfloat16_by_margin(tmp_path, capsys):
    model = make_hf_dir(tmp_path / "m", dtype="bfloat16")
    assert cli.main(["compare", "--model", str(model), "--dtype", "bfloat16", "--runner", "jax,torch", *FLAGS]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schedules_equal"] is True
    assert data["largest_margin"] == 0.0 or not data["tokens_equal"]


@needs_torch
def test_the_margin_is_the_difference_of_the_two_logits(tmp_path):
    import numpy as np
    import torch
    from helpers_models import DenseContext

    from jaxoverlap.compare.margins import largest_margin
    from jaxoverlap.compare.torch_model import TorchDecoder
    from jaxoverlap.models import registry

    module = registry.load(EngineConfig(model_path=str(make_hf_dir(tmp_path / "m")), dtype="float32")).module
    context = DenseContext.of_lengths([4])
    hidden, _ = module(np.array([3, 4, 5, 9], np.int32), context, context.cache(module))
    logits = np.asarray(module.logits(hidden[-1:]))[0]
    made = {"jax": [[9, 20]], "torch": [[9, 30]]}
    comparison = Comparison([[3, 4, 5]], {k: [Run(ids, [], 1.0, Trace())] for k, ids in made.items()})
    got = largest_margin(comparison, TorchDecoder.sharing(module))
    assert got == pytest.approx(abs(float(logits[20] - logits[30])), abs=1e-4)
    comparison.runs["torch"][0].output_ids = [[9]]
    assert largest_margin(comparison, TorchDecoder.sharing(module)) == float("inf")
    assert torch.is_inference_mode_enabled() is False


@needs_torch
@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_model_gives_the_reference_tokens_in_all_four(demo_model):
    cases = json.loads((Path(__file__).parents[1] / "data" / "smollm2_goldens.json").read_text())["cases"][:8]
    config = EngineConfig(
        model_path=str(demo_model), dtype="float32", context_length=160, max_total_tokens=1280,
        max_running_requests=8, chunked_prefill_size=128, grammar_backend="none",
    )  # fmt: skip
    with Engine.from_config(config) as jax, runners.torch_engine(jax, silent) as torch:
        engines = all_loops({"jax": jax, "torch": torch})
        params = {"temperature": 0.0, "max_new_tokens": 48}
        comparison = compare(engines, [c["prompt_ids"] for c in cases], params, 1, silent)
    assert list(comparison.runs) == NAMES
    for (run,) in comparison.runs.values():
        assert run.output_ids == [c["output_ids"] for c in cases]
    assert comparison.first_schedule_difference is None


def two(schedules):
    runs = {name: [Run([[1]], [0.1], 1.0, Trace(), schedule)] for name, schedule in schedules.items()}
    return Comparison([[9]], runs)


def test_schedules_are_compared_loop_by_loop():
    launch, result = {"event": "launch", "mode": "DECODE", "seq_lens": [3]}, {"event": "result"}
    normal, overlap = [launch, result], [launch, launch, result]
    same = dict(zip(NAMES, [normal, overlap, normal, overlap]))
    assert figures(two(same))["schedules_equal"] is True
    data = figures(two({**same, "torch overlap": [launch, {**launch, "seq_lens": [4]}, result]}))
    assert data["schedules_equal"] is False
    assert data["first_schedule_difference"]["loop"] == "torch overlap"
    assert data["first_schedule_difference"]["event"] == 1
    assert "[4]" in schedule_verdict(data)
    data = figures(two({**same, "torch normal": normal[:1]}))
    want = {"loop": "torch normal", "repeat": 0, "event": 1, "expected": result, "got": None}
    assert data["first_schedule_difference"] == want


@pytest.mark.parametrize(
    ("equal", "margin", "want"),
    [(True, None, True), (False, None, False), (False, MARGIN, True), (False, MARGIN + 0.01, False)],
)
def test_tokens_may_differ_by_rounding_alone(equal, margin, want):
    data = {"tokens_equal": equal, "largest_margin": margin, "schedules_equal": True}
    assert same_tokens(data) is want
    assert agrees(data) is want
    assert agrees({**data, "schedules_equal": False}) is False


def test_what_drafts_give_counts_too():
    data = {"tokens_equal": True, "schedules_equal": True}
    for loops, without, want in [(True, True, True), (False, True, False), (True, False, False)]:
        assert agrees({**data, "speculative": {"tokens_equal": loops, "same_tokens": without}}) is want


def test_what_cannot_be_compared_is_named(capsys, monkeypatch):
    assert cli.main(["compare", "--device", "simulated", "--runner", "jax,torch"]) == 1
    assert "simulated" in capsys.readouterr().err
    assert cli.main(["compare", "--model", "checksum", "--runner", "jax,torch", "--schedule-policy", "random"]) == 1
    assert "random_seed" in capsys.readouterr().err
    ranks = ["--dp-size", "2", "--enable-dp-attention"]
    assert cli.main(["compare", "--model", "checksum", "--runner", "jax,torch", *ranks]) == 1
    assert "dp_size must be 1, not 2" in capsys.readouterr().err
    if importlib.util.find_spec("torch") is not None:
        assert cli.main(["compare", "--model", "checksum", "--runner", "jax,torch", "--deterministic"]) == 1
        assert "deterministic" in capsys.readouterr().err
    monkeypatch.setattr(runners.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["compare", "--model", "checksum", "--runner", "jax,torch"]) == 1
    assert 'pip install "jaxoverlap[torch]"' in capsys.readouterr().err
    assert cli.main(["compare", "--model", "checksum", "--against-sglang"]) == 1
    assert 'pip install "sglang==' in capsys.readouterr().err
