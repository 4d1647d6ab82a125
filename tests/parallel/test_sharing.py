"""Ranks that share a model's weights: what each holds, and the same answers as from one that holds all."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.models import registry
from jaxoverlap.models.sharding import Split
from jaxoverlap.parallel.mesh import RankMesh

MODELS = {
    "llama, biases, a vocabulary that does not divide": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "vocab_size": 270,
    },
    "qwen3, tied": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3 moe, one dense layer": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
PROMPTS = [[5, 250, 17, 17, 3, 99, 0, 42, 8] * 4, [261, 1, 60], [7], [9, 8, 7, 6, 5, 4]]


def test_shares_put_together_are_the_whole():
    array = np.arange(2 * 12 * 3).reshape(24, 3)
    for ranks in (1, 2, 3, 4):
        halves = [Split(groups=2).share(array, rank, ranks) for rank in range(ranks)]
        gate, up = (np.concatenate([np.split(share, 2)[half] for share in halves]) for half in (0, 1))
        np.testing.assert_array_equal(np.concatenate([gate, up]), array)
    columns = [Split(axis=1).share(array, rank, 3) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate(columns, axis=1), array)
    padded = np.concatenate([Split(padded=True).share(array[:22], rank, 4) for rank in range(4)])
    np.testing.assert_array_equal(padded, np.concatenate([array[:22], np.zeros((2, 3))]))
    once = [Split(first_only=True).share(array, rank, 2) for rank in range(2)]
    np.testing.assert_array_equal(sum(once), array)
    with pytest.raises(ValueError, match=r"24 of \[24, 3\] does not divide into 5 shares"):
        Split().share(array, 0, 5)


def test_each_rank_holds_its_share_and_nothing_else(tmp_path):
    changes = MODELS["qwen3 moe, one dense layer"]
    directory, ranks = make_hf_dir(tmp_path, **changes), 4
    weights = tiny_weights({**TINY_CONFIG, **changes})
    module = registry.load(EngineConfig(model_path=str(directory)), mesh=RankMesh(jax.devices()[:ranks])).module
    gate = weights["model.layers.1.mlp.gate_proj.weight"]
    up = weights["model.layers.1.mlp.up_proj.weight"]
    for rank in range(ranks):
        rows = slice(12 * rank, 12 * (rank + 1))
        held = module.layers[1].mlp.gate_up.weight[...].addressable_data(rank)
        np.testing.assert_array_equal(held, np.concatenate([gate[rows], up[rows]]))
        held = module.layers[0].mlp.down[...].addressable_data(rank)
        expert = weights["model.layers.0.mlp.experts.3.down_proj.weight"]
        np.testing.assert_array_equal(held[3], expert[:, 6 * rank : 6 * (rank + 1)])
        held = module.embedding[...].addressable_data(rank)
        np.testing.assert_array_equal(held, weights["model.embed_tokens.weight"][68 * rank : 68 * (rank + 1)])
        held = module.layers[0].attention.output.weight[...].addressable_data(rank)
        np.testing.assert_array_equal(held, weights["model.layers.0.self_attn.o_proj.weight"])


def answers(directory, dp_size, **settings):
    """Output ids and log-probabilities of PROMPTS."""
    settings = {
        "max_running_requests": 2,
        "max_total_tokens": 256,
        "context_length": 64,
        "chunked_prefill_size": 16,
        "grammar_backend": "none",
        "audit": True,
        "dp_size": dp_size,
        "enable_dp_attention": dp_size > 1,
        **settings,
    }
    with Engine(str(directory), **settings) as engine:
        params = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
        results = engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        if dp_size > 1:
            assert len({m["launches"] for m in engine.metrics()["ranks"]}) == 1
            assert all(m["output_tokens"] > 0 for m in engine.metrics()["ranks"])
    ids = [r["output_ids"] for r in results]
    return ids, np.array([[x[0] for x in r["meta_info"]["output_token_logprobs"]] for r in results])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("llama, biases, a vocabulary that does not divide", (4,), marks=pytest.mark.soak),
        pytest.param("qwen3, tied", (4,), marks=pytest.mark.soak),
        pytest.param("qwen3 moe, one dense layer", (2, 4), marks=pytest.mark.slow),
    ],
)
def test_the_same_answers_as_alone(tmp_path, name, sizes):
    directory = make_hf_dir(tmp_path, **MODELS[name])
    ids, logprobs = answers(directory, 1)
    for dp_size in sizes:
        for loop in (True, False) if dp_size == 4 else (False,):
            got, told = answers(directory, dp_size, disable_overlap_schedule=loop)
            assert got == ids
            np.testing.assert_allclose(told, logprobs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_other_weights_in_flight(tmp_path):
    """Engine.update_weights: each rank takes its share, and nothing is compiled."""
    first, second = (make_hf_dir(tmp_path / str(seed), seed=seed, **MODELS["qwen3, tied"]) for seed in (0, 1))
    wanted = answers(second, 1)[0]
    settings = {"max_running_requests": 2, "max_total_tokens": 256, "context_length": 64, "chunked_prefill_size": 16}
    params = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
    with Engine(str(first), grammar_backend="none", dp_size=2, enable_dp_attention=True, **settings) as engine:
        before = [r["output_ids"] for r in engine.generate(input_ids=PROMPTS, sampling_params=params)]
        compiles = engine.runner.compiles
        engine.update_weights(str(second))
        after = [r["output_ids"] for r in engine.generate(input_ids=PROMPTS, sampling_params=params)]
        assert engine.runner.compiles == compiles
    assert after == wanted
    assert before != wanted


def test_a_size_that_does_not_divide_is_named(tmp_path):
    directory = make_hf_dir(tmp_path, intermediate_size=42)
    with pytest.raises(
        CheckpointError, match=r"dp_size 4: parameter layers\.0\.mlp\.\S+: 42 of \[.*\] does not divide"
    ):
        Engine(str(directory), dp_size=4, enable_dp_attention=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_size": 2}, "dp_size 2 needs enable_dp_attention"),
        ({"enable_dp_attention": True}, "enable_dp_attention needs dp_size above 1"),
        ({"dp_sync": "host"}, "dp_sync needs dp_size above 1"),
        ({"load_balance_method": "shortest_queue"}, "load_balance_method needs dp_size above 1"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"max_logprobs": 2}, {"speculative_algorithm": "NGRAM"}, {"deterministic": True}, {"dp_size": 64}]
)
def test_what_ranks_do_not_do_is_refused_by_name(settings):
    config = EngineConfig(**{"model_path": "checksum", "dp_size": 2, "enable_dp_attention": True, **settings})
    with pytest.raises(ValueError, match=next(iter(settings))):
        Engine.from_config(dataclasses.replace(config))
