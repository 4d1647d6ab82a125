"""`deterministic=True`: a request's tokens and the bits of their log-probabilities are those of its run alone."""

import numpy as np
import pytest
from helpers_models import make_hf_dir

from jaxoverlap.engine import Engine

TINY = {"max_running_requests": 4, "chunked_prefill_size": 8, "context_length": 96, "random_seed": 0, "audit": True}


def random_load(rng, vocab, longest, outputs, count):
    """[(turn of arrival, prompt, sampling parameters)]; some share a prefix, some are seeded, some penalised."""
    shared = rng.integers(3, vocab, longest).tolist()
    load = []
    for _ in range(count):
        prompt = rng.integers(3, vocab, rng.integers(1, longest // 2)).tolist()
        if rng.random() < 0.5:
            prompt = (shared[: rng.integers(1, longest // 2)] + prompt)[:longest]
        params = {"max_new_tokens": int(rng.integers(1, outputs + 1)), "temperature": 0.0, "ignore_eos": True}
        if rng.random() < 0.5:
            params |= {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "sampling_seed": int(rng.integers(1 << 32))}
        if rng.random() < 0.3:
            params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_new_tokens": 1}
        load.append((int(rng.integers(0, 12)), prompt, params))
    return load


def answers(engine, load):
    """(ids, log-probabilities) of each request."""
    streams, results = {}, {}
    for turn in range(13):
        for i, (arrival, prompt, params) in enumerate(load):
            if arrival == turn:
                call = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                streams[i] = engine.generate(**call, stream=True)
        before = engine.metrics()["turns"]
        engine._loop.drive(lambda before=before: engine.metrics()["turns"] > before)
    for i, stream in streams.items():
        *_, results[i] = stream
    return [
        (r["output_ids"], [p for p, _, _ in r["meta_info"]["output_token_logprobs"]])
        for _, r in sorted(results.items())
    ]


def alone(engine, load):
    out = []
    for _, prompt, params in load:
        engine.flush_cache()
        r = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
        out.append((r["output_ids"], [p for p, _, _ in r["meta_info"]["output_token_logprobs"]]))
    return out


def check(reference, engines, rng, loads, **sizes):
    for _ in range(loads):
        load = random_load(rng, **sizes)
        expected = alone(reference, load)
        for engine in engines:
            assert answers(engine, load) == expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_hf_dir(tmp_path_factory.mktemp("tiny"), max_position_embeddings=96))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_total_tokens": 384}, marks=pytest.mark.slow),
        {"max_total_tokens": 64, "page_size": 4},
        pytest.param({"enable_mixed_chunk": True}, marks=pytest.mark.slow),
    ],
    ids=["", "page4-retracts", "mixed"],
)
def test_tiny_model(tiny, settings):
    """With 64 tokens for 4 rows some are retracted and prefilled again."""
    settings = {"model_path": tiny, "deterministic": True, "grammar_backend": "none", **TINY, **settings}
    if settings.get("max_total_tokens") == 64:
        settings |= {"init_new_token_ratio": 0.05, "retract_decode_steps": 2}
    with (
        Engine(**settings) as overlap,
        Engine(**settings, disable_overlap_schedule=True) as normal,
    ):
        assert len(overlap.runner.buckets.extend) == 1
        assert not overlap.runner.buckets.decode
        check(overlap, [overlap, normal], np.random.default_rng(5), 12, vocab=250, longest=24, outputs=24, count=7)
        metrics = overlap.metrics()
        assert metrics["cached_tokens"] > 0
        if settings.get("max_total_tokens") == 64:
            assert metrics["retracted"] > 0


@pytest.mark.parametrize("kernels", ["xla", pytest.param("interpret", marks=pytest.mark.slow)])
def test_experts(tmp_path, kernels):
    """What other tokens choose changes the order in which the experts' products are computed, and no bit of them."""
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2}
    directory = make_hf_dir(tmp_path, max_position_embeddings=96, moe_intermediate_size=24, **moe)
    settings = {"model_path": str(directory), "deterministic": True, "grammar_backend": "none", "kernels": kernels}
    with Engine(**settings, **TINY, max_total_tokens=384) as engine:
        check(engine, [engine], np.random.default_rng(5), 3, vocab=250, longest=24, outputs=16, count=7)


def test_without_it_shapes_differ(tiny):
    """The default runs of the same load have other shapes, so that bits may differ: what the setting is for."""
    with Engine(model_path=tiny, grammar_backend="none", skip_warmup=True, **TINY) as engine:
        assert len(engine.runner.buckets.decode) > 1


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"chunked_prefill_size": -1}, ["deterministic", "chunked_prefill_size"]),
        ({"device": "simulated"}, ["deterministic", "simulated"]),
    ],
)
def test_refused(settings, parts):
    with pytest.raises(ValueError, match=parts[0]) as error:
        Engine(**{"model_path": "checksum", "deterministic": True, **settings})
    assert all(part in str(error.value) for part in parts)


@pytest.mark.soak
@pytest.mark.demo
def test_demo_model_over_fifty_random_loads(demo_model):
    settings = {
        **{"model_path": str(demo_model), "deterministic": True, "grammar_backend": "none", "random_seed": 0},
        **{"max_running_requests": 4, "chunked_prefill_size": 8, "context_length": 64, "audit": True},
        **{"max_total_tokens": 48},
    }
    with Engine(**settings) as overlap, Engine(**settings, disable_overlap_schedule=True) as normal:
        rng = np.random.default_rng(11)
        for i in range(50):  # the loops take turns: each load's reference is the other one's run alone
            here, other = (overlap, normal) if i % 2 else (normal, overlap)
            check(other, [here], rng, 1, vocab=49000, longest=20, outputs=5, count=3)
