"""Qwen2, Qwen3 and Qwen3-MoE through the engine: the float64 forward's tokens, and the same with overlap on and off."""

import dataclasses

import numpy as np
import pytest
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights
from test_llama import CASES, reference_logits

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load

PROMPTS = [[5, 250, 17, 17, 3, 99, 0, 42, 8], [271, 1, 60], [7] * 12, [9, 4]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_new_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3 moe, dense layers", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3 moe", "qwen2"))],
)
def test_overlap_changes_no_token(tmp_path, name):
    directory = make_hf_dir(tmp_path, **CASES[name])
    config = EngineConfig(
        model_path=str(directory),
        context_length=32,
        max_total_tokens=96,
        page_size=4,
        max_running_requests=2,
        chunked_prefill_size=8,
        random_seed=3,
        skip_warmup=True,
    )
    model, runner, total = load(config)
    answers = {}
    for off in (False, True):
        engine = Engine.from_parts(dataclasses.replace(config, disable_overlap_schedule=off), model, runner, total)
        params = [GREEDY, GREEDY, *({**SAMPLED, "sampling_seed": seed} for seed in (1, 2))]
        answers[off] = [r["output_ids"] for r in engine.generate(input_ids=PROMPTS, sampling_params=params)]
        engine.wait_idle()
    runner.shutdown()
    assert answers[False] == answers[True]
    settings = {**TINY_CONFIG, **CASES[name]}
    weights = tiny_weights(settings)
    for prompt, tokens in zip(PROMPTS[:2], answers[False]):
        logits = reference_logits(settings, weights, prompt + tokens[:-1])
        assert tokens == np.argmax(logits[len(prompt) - 1 :], axis=1).tolist()
