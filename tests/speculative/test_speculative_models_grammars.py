"""Grammars with drafts on the demo model: outputs are valid, and those without speculation, greedy and seeded."""

import dataclasses
import json
import sys
from pathlib import Path

import jsonschema
import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load, load_grammar_backend

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))
from test_models_grammars import ASKED, CAP, GOLDENS

pytestmark = pytest.mark.demo
FREE = GOLDENS[:4]
GREEDY = {"temperature": 0.0, "max_new_tokens": CAP}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": CAP}
DRAFTS = {
    "ngram": {"speculative_algorithm": "NGRAM"},
    "25 layers": {"speculative_algorithm": "STANDALONE", "speculative_draft_layers": 25},
}
LOOPS = {
    "normal": {"disable_overlap_schedule": True},
    "overlap": {},
    "drafts first": {"speculative_grammar_overlap": True},
}


def answers(demo_model, loops, **settings):
    """By loop: the results of 8 greedy and 4 seeded constrained requests and 4 free ones, and the engine's metrics."""
    config = EngineConfig(
        model_path=str(demo_model),
        dtype="float32",
        context_length=200,
        max_total_tokens=3200,
        max_running_requests=16,
        chunked_prefill_size=128,
        **settings,
    )
    model, runner, total = load(config)
    backend = load_grammar_backend(config, model)
    out = {}
    for loop in loops:
        engine = Engine.from_parts(dataclasses.replace(config, **LOOPS[loop]), model, runner, total, backend)
        chats = [engine.tokenizer.encode_chat([{"role": "user", "content": question}]) for question, _ in ASKED]
        sampling = [{**GREEDY, "json_schema": schema} for _, schema in ASKED]
        sampling += [{**SEEDED, "sampling_seed": i, "json_schema": schema} for i, (_, schema) in enumerate(ASKED[:4])]
        sampling += [{**GREEDY, "max_new_tokens": 48} for _ in FREE]
        prompts = [*chats, *chats[:4], *(golden["prompt_ids"] for golden in FREE)]
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        engine.wait_idle()
        out[loop] = results, engine.metrics()
    backend.shutdown()
    runner.shutdown()
    return out


@pytest.fixture(scope="module")
def plain(demo_model):
    results, _ = answers(demo_model, ["overlap"])["overlap"]
    return [result["output_ids"] for result in results]


@pytest.mark.soak
@pytest.mark.parametrize("drafts", DRAFTS)
def test_outputs_are_valid_and_those_without_speculation(demo_model, plain, drafts):
    by_loop = answers(demo_model, LOOPS, **DRAFTS[drafts])
    for loop, (results, metrics) in by_loop.items():
        assert [result["output_ids"] for result in results] == plain, loop
        for result, (_, schema) in zip(results, [*ASKED, *ASKED[:4]]):
            assert result["meta_info"]["finish_reason"]["type"] == "stop"
            jsonschema.validate(json.loads(result["text"]), schema, format_checker=jsonschema.FormatChecker())
        for result, golden in zip(results[-len(FREE) :], FREE):
            assert result["output_ids"] == golden["output_ids"]
        assert metrics["accepted_drafts"] > 0
        assert (metrics["overlap_disabled"] > 0) == (loop == "overlap")
