"""The demo model through the engine: 20 prompts whose greedy tokens torch gave from the same weights (bf16 stored,
float32 computed)."""

import json
from pathlib import Path

import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_goldens.json").read_text())["cases"]
SLOTS = 16
GREEDY = {"temperature": 0.0, "max_new_tokens": 48}

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def parts(demo_model):
    yield from loaded(demo_model, SLOTS, 128)


@pytest.fixture(scope="module")
def small(demo_model):
    """With fewer programs to compile."""
    yield from loaded(demo_model, 4, 32)


def loaded(demo_model, slots, chunk):
    config = EngineConfig(
        model_path=str(demo_model),
        dtype="float32",
        context_length=160,
        max_total_tokens=160 * slots,
        max_running_requests=slots,
        chunked_prefill_size=chunk,
        grammar_backend="none",
    )
    model, runner, total = load(config)
    yield config, model, runner, total
    runner.shutdown()


def engine_on(parts, loop):
    config, model, runner, total = parts
    fields = {name: getattr(config, name) for name in config.__slots__}
    return Engine.from_parts(
        EngineConfig(**{**fields, "disable_overlap_schedule": loop == "normal"}), model, runner, total
    )


def check(engine, cases, at_once):
    """Tokens that agree; fails on the first request that differs."""
    tokens = 0
    for i in range(0, len(cases), at_once):
        some = cases[i : i + at_once]
        results = engine.generate(input_ids=[c["prompt_ids"] for c in some], sampling_params=GREEDY)
        for case, result in zip(some, results):
            assert result["output_ids"] == case["output_ids"], case["prompt"]
            tokens += len(result["output_ids"])
    engine.wait_idle()
    assert engine.metrics()["free_slots"] == engine.config.max_running_requests
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_all_at_once_with_fewer_slots(parts, loop):
    assert check(engine_on(parts, loop), CASES, len(CASES)) == 831


@pytest.mark.parametrize(("loop", "at_once"), [("overlap", 1), ("normal", 1), ("overlap", 4), ("normal", 4)])
def test_a_few(small, loop, at_once):
    some = CASES[: max(2, at_once)]
    assert check(engine_on(small, loop), some, at_once) == sum(len(c["output_ids"]) for c in some)


@pytest.mark.parametrize("loop", ["overlap", "normal"])
@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.soak)])
def test_all(parts, loop, at_once):
    assert check(engine_on(parts, loop), CASES, at_once) == 831


def test_text_and_logprobs(small):
    engine = engine_on(small, "overlap")
    case = CASES[0]
    assert case["chat"]
    result = engine.chat([{"role": "user", "content": case["prompt"]}], GREEDY, return_logprob=True)
    assert result["meta_info"]["prompt_tokens"] == len(case["prompt_ids"])
    assert result["text"] + "<|im_end|>" == case["text"]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    logprobs = [lp for lp, _, _ in result["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(case["logprob"], abs=1e-3)


@pytest.mark.soak
def test_logprobs_of_prompts_and_of_the_likeliest(demo_model):
    """The reference's outputs as part of a prompt: their log-probabilities are then those of input tokens, in chunks.
    Each is the likeliest, since the reference was greedy."""
    config = EngineConfig(
        model_path=str(demo_model),
        dtype="float32",
        context_length=160,
        max_total_tokens=480,
        max_running_requests=1,
        chunked_prefill_size=16,
        max_logprobs=2,
    )
    model, runner, total = load(config)
    engine = Engine.from_parts(config, model, runner, total)
    some = CASES[:5]
    results = engine.generate(
        input_ids=[c["prompt_ids"] + c["output_ids"] for c in some],
        sampling_params={**GREEDY, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=[len(c["prompt_ids"]) - 1 for c in some],
        top_logprobs_num=2,
        token_ids_logprob=[c["output_ids"][:1] for c in some],
    )
    for case, result in zip(some, results):
        meta = result["meta_info"]
        (_, *told), (_, *tops) = meta["input_token_logprobs"], meta["input_top_logprobs"]
        assert [t for _, t, _ in told] == case["output_ids"]
        assert [lp for lp, _, _ in told] == pytest.approx(case["logprob"], abs=1e-3)
        assert [entries[0] for entries in tops] == told
        margins = [first[0] - second[0] for first, second in tops]
        assert margins == pytest.approx(case["top2_margin"], abs=1e-3)
        assert meta["input_token_ids_logprobs"][1] == told[:1]
    results = engine.generate(
        input_ids=some[0]["prompt_ids"], sampling_params=GREEDY, return_logprob=True, top_logprobs_num=1
    )
    meta = results["meta_info"]
    assert results["output_ids"] == some[0]["output_ids"]
    assert [entries[0] for entries in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert [lp for lp, _, _ in meta["output_token_logprobs"]] == pytest.approx(some[0]["logprob"], abs=1e-3)
    engine.wait_idle()
    runner.shutdown()
