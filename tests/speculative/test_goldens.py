"""The demo model with drafts: the reference's tokens, and how many drafts counted."""

import json
from pathlib import Path

import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_goldens.json").read_text())["cases"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 48}
pytestmark = pytest.mark.demo
ACCEPTED = {25: 0.41, 28: 0.54}  # at k = 1, of the drafts of so many layers: counted apart from this package


def run(demo_model, tokens, cases, **settings):
    """Checks both loops and gives the share of drafts that counted."""
    config = EngineConfig(
        model_path=str(demo_model),
        dtype="float32",
        context_length=160,
        max_total_tokens=2560,
        max_running_requests=10,
        chunked_prefill_size=128,
        grammar_backend="none",
        speculative_num_draft_tokens=tokens,
        **settings,
    )
    model, runner, total = load(config)
    fields = {name: getattr(config, name) for name in config.__slots__}
    for normal in (False, True):
        engine = Engine.from_parts(EngineConfig(**{**fields, "disable_overlap_schedule": normal}), model, runner, total)
        results = engine.generate(input_ids=[c["prompt_ids"] for c in cases], sampling_params=GREEDY)
        for case, result in zip(cases, results):
            assert result["output_ids"] == case["output_ids"], case["prompt"]
        engine.wait_idle()
        metrics = engine.metrics()
    runner.shutdown()
    return metrics["accepted_drafts"] / (metrics["verified_rows"] * (tokens - 1))


def test_first_layers(demo_model):
    assert run(demo_model, 2, CASES, speculative_algorithm="STANDALONE", speculative_draft_layers=25) == pytest.approx(
        ACCEPTED[25], abs=0.03
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 3, 5])
@pytest.mark.parametrize("layers", [25, 28])
def test_all_first_layers(demo_model, layers, drafts):
    rate = run(demo_model, drafts + 1, CASES, speculative_algorithm="STANDALONE", speculative_draft_layers=layers)
    if drafts == 1:
        assert rate == pytest.approx(ACCEPTED[layers], abs=0.03)
    assert 0 < rate < 1


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_ngram(demo_model, drafts):
    assert 0 < run(demo_model, drafts + 1, CASES, speculative_algorithm="NGRAM") < 1


@pytest.mark.slow
def test_a_draft_model(demo_model):
    """The model as its own draft: nearly every draft is its own token."""
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(demo_model)}
    assert run(demo_model, 4, CASES[:6], **settings) > 0.95
