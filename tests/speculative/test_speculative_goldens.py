"""The demo model with drafts: the reference's tokens, and how many drafts counted."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_models import DenseContext

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load
from jaxoverlap.models.registry import load_directory

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_goldens.json").read_text())["cases"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 48}
pytestmark = pytest.mark.demo


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


class Paged:
    """The batch of one row as a model sees it."""

    def __init__(self, tokens):
        self.dense = DenseContext.of_lengths([tokens])
        self.positions = jnp.asarray(self.dense.positions)
        self.write, self.attend = self.dense.write, self.dense.attend


def expected_rates(demo_model, layers, cases):
    """From the first layers' likeliest token at each place of the reference, with no cache and no scheduler: the share
    of drafts that count in chains of one, where a draft that counts takes the place behind it along; and the share of
    all places where that token is the reference's (next-token agreement)."""
    model = load_directory(demo_model, EngineConfig(dtype="float32")).module
    longest = max(len(c["prompt_ids"]) + len(c["output_ids"]) for c in cases)

    @nnx.jit
    def likeliest(model, ids):
        context = Paged(longest)
        hidden, _ = model(ids, context, context.dense.cache(model), num_layers=layers)
        return jnp.argmax(model.logits(hidden), -1)

    accepted = steps = agreed = 0
    for case in cases:
        prompt, outputs = case["prompt_ids"], case["output_ids"]
        ids = np.zeros(longest, np.int32)
        ids[: len(prompt) + len(outputs)] = prompt + outputs
        drafts = np.asarray(likeliest(model, jnp.asarray(ids)))[len(prompt) - 1 :]
        agreed += (drafts[: len(outputs)] == outputs).sum()
        i = 0
        while i < len(outputs) - 1:
            right = drafts[i + 1] == outputs[i + 1]
            accepted, steps, i = accepted + right, steps + 1, i + 1 + right
    return accepted / steps, agreed / sum(len(c["output_ids"]) for c in cases)


@pytest.mark.soak
@pytest.mark.parametrize("layers", [25, 28])
def test_one_draft_of_the_first_layers(demo_model, layers):
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_layers": layers}
    rate = run(demo_model, 2, CASES, **settings)
    expected, agreement = expected_rates(demo_model, layers, CASES)
    assert rate == pytest.approx(expected, abs=1e-9)
    assert agreement == pytest.approx({25: 0.41, 28: 0.54}[layers], abs=0.03)


@pytest.mark.soak
@pytest.mark.parametrize("drafts", [3, 5])
@pytest.mark.parametrize("layers", [25, 28])
def test_chains_of_the_first_layers(demo_model, layers, drafts):
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_layers": layers}
    assert 0 < run(demo_model, drafts + 1, CASES, **settings) < 1


@pytest.mark.soak
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_ngram(demo_model, drafts):
    assert 0 < run(demo_model, drafts + 1, CASES, speculative_algorithm="NGRAM") < 1


@pytest.mark.soak
def test_a_draft_model(demo_model):
    """The model as its own draft: nearly every draft is its own token."""
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(demo_model)}
    assert run(demo_model, 4, CASES[:6], **settings) > 0.95
