"""TorchRunner: the same tokens as JAX, whatever is sampled, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from helpers_engine import model_of
from helpers_models import make_hf_dir

pytest.importorskip("torch", reason="needs torch")

import torch

from jaxoverlap.compare.torch_checksum import TorchChecksum
from jaxoverlap.compare.torch_model import TorchDecoder
from jaxoverlap.compare.torch_runner import TorchRunner
from jaxoverlap.compare.torch_sample import RowParams, noise, sample
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load
from jaxoverlap.models import registry
from jaxoverlap.models.checksum import ChecksumConfig
from jaxoverlap.models.shapes import published

FAMILIES = {
    "llama": {},
    "llama-bias-untied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}
PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 17, 40, 2)]
SETTINGS = {"max_running_requests": 4, "max_total_tokens": 320, "chunked_prefill_size": 16, "context_length": 96}


def engines(directory, **settings):
    """On one set of weights: JAX, and PyTorch in both loops."""
    config = EngineConfig(
        **{"model_path": str(directory), "dtype": "float32", "grammar_backend": "none", "page_size": 4},
        **{**SETTINGS, **settings},
    )
    model, runner, total = load(config)
    theirs = TorchRunner(
        TorchDecoder.sharing(model.module), config, max_total_tokens=total, context_length=model.context_length
    )
    jax = Engine.from_parts(config, model, runner, total)
    normal = dataclasses.replace(config, disable_overlap_schedule=True)
    return jax, [Engine.from_parts(c, model, theirs, total) for c in (config, normal)]


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ValueError, match=r"computes no mixture of experts \(num_experts 8\)"):
        TorchDecoder(published("tiny-moe"), {})


QUICK = ("llama-bias-untied", "qwen3")


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f not in QUICK)]
)
def test_the_tokens_of_jax_in_both_loops(family, tmp_path):
    jax, theirs = engines(make_hf_dir(tmp_path / "m", **FAMILIES[family]))
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    sampled = {"temperature": 0.9, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5}
    params = [greedy, sampled, {**sampled, "top_k": 7}, {**sampled, "top_p": 0.6}, {**sampled, "min_p": 0.1}]
    want = jax.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    for engine in theirs:
        got = engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        assert [r["output_ids"] for r in got] == [r["output_ids"] for r in want]
        for a, b in zip(got, want):
            a, b = ([x[0] for x in r["meta_info"]["output_token_logprobs"]] for r in (a, b))
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_mixed_batches_and_short_pools(tmp_path):
    tight = {"max_total_tokens": 96, "init_new_token_ratio": 0.1}
    jax, theirs = engines(make_hf_dir(tmp_path / "m"), enable_mixed_chunk=True, **tight)
    params = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
    want = [r["output_ids"] for r in jax.generate(input_ids=PROMPTS, sampling_params=params)]
    for engine in theirs:
        assert [r["output_ids"] for r in engine.generate(input_ids=PROMPTS, sampling_params=params)] == want
        assert engine.metrics()["retracted"] > 0


def test_the_noise_is_that_of_jax():
    import jax

    for seed, position in ((0, 0), (7, 3), (2**32 - 1, 4095)):
        key = jax.random.fold_in(jax.random.key(seed), position)
        want = np.asarray(jax.random.gumbel(key, (1000,)))
        got = noise(torch.tensor([seed]).int(), torch.tensor([position]), 1000)
        np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-5, atol=1e-6)


def test_masks_ties_and_forced_tokens():
    logits = torch.zeros(4, 70)
    logits[0, 65] = logits[0, 66] = 2.0
    mask = torch.full((4, 3), -1, dtype=torch.int32)
    mask[1] = torch.tensor([0, 1 << 5, 0])  # id 37 alone
    ones = torch.ones(4)
    params = RowParams(ones * 0, ones, ones * 0, -ones.int(), ones.int(), True, False)
    forced = torch.tensor([-1, -1, 3, -1])
    tokens, logprobs = sample(logits, params, torch.arange(4), mask, forced)
    assert tokens.tolist() == [65, 37, 3, 0]
    np.testing.assert_allclose(logprobs[1:], -np.log(70), rtol=1e-6)


@pytest.mark.parametrize(
    "setting", [{"deterministic": True}, {"max_logprobs": 3}, {"poison_future_map": True}], ids=lambda s: next(iter(s))
)
def test_settings_that_it_does_not_enforce(setting):
    config = EngineConfig(model_path="checksum", **setting)
    with pytest.raises(ValueError, match=next(iter(setting))):
        TorchRunner(TorchChecksum(), config, max_total_tokens=64, context_length=64)


@pytest.mark.parametrize("setting", [{"frequency_penalty": 0.5}, {"min_new_tokens": 2}, {"logit_bias": {5: 1.0}}])
def test_a_request_that_it_does_not_enforce_ends_alone(setting):
    config = EngineConfig(model_path="checksum", **SETTINGS)
    runner = TorchRunner(TorchChecksum(), config, max_total_tokens=320, context_length=96)
    engine = Engine.from_parts(config, model_of(context_length=96), runner, 320)
    plain = {"temperature": 0.0, "max_new_tokens": 5}
    bad, good = engine.generate(input_ids=[[5, 6], [7, 8]], sampling_params=[{**plain, **setting}, plain])
    assert next(iter(setting)) in bad["meta_info"]["finish_reason"]["message"]
    assert bad["meta_info"]["finish_reason"]["status_code"] == 400
    assert good["output_ids"] == ChecksumConfig().oracle([7, 8], 5)


@pytest.mark.gpu
def test_cuda_graphs_give_the_tokens_of_the_eager_step():
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    config = EngineConfig(model_path="checksum", **SETTINGS)
    runner = TorchRunner(TorchChecksum(), config, max_total_tokens=320, context_length=96, device="cuda")
    runner.warm_up()
    engine = Engine.from_parts(config, model_of(context_length=96), runner, 320)
    results = engine.generate(input_ids=PROMPTS, sampling_params={"temperature": 0.0, "max_new_tokens": 20})
    oracle = ChecksumConfig().oracle
    assert [r["output_ids"] for r in results] == [oracle(p, 20, eos=2) for p in PROMPTS]


@pytest.mark.demo
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_the_reference_tokens_of_the_demo_model(demo_model, loop):
    cases = json.loads((Path(__file__).parents[1] / "data" / "smollm2_goldens.json").read_text())["cases"]
    lengths = {"context_length": 160, "max_total_tokens": 1280}
    config = EngineConfig(
        model_path=str(demo_model), dtype="float32", max_running_requests=8, chunked_prefill_size=128,
        disable_overlap_schedule=loop == "normal", grammar_backend="none", **lengths,
    )  # fmt: skip
    model = registry.load(config)
    runner = TorchRunner(TorchDecoder.sharing(model.module), config, max_total_tokens=1280, context_length=160)
    engine = Engine.from_parts(config, model, runner, 1280)
    params = {"temperature": 0.0, "max_new_tokens": 48}
    results = engine.generate(input_ids=[c["prompt_ids"] for c in cases], sampling_params=params)
    assert [r["output_ids"] for r in results] == [c["output_ids"] for c in cases]
