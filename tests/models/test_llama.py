"""Llama, Mistral and Qwen, with experts too, against a float64 forward from the formulas; the demo model's goldens."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers_models import TINY_CONFIG, DenseContext, make_hf_dir, tiny_weights

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.config import EngineConfig
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.models import registry
from jaxoverlap.models.llama import llama_config, mistral_config
from jaxoverlap.models.paged import PagedContext
from jaxoverlap.models.qwen3 import qwen2_config, qwen3_config

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_goldens.json").read_text())["cases"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 24, "rope_theta": 1e6}


def rope_angle(config: dict, i: int) -> float:
    """Radians a position of pair i, from the published rules, one number at a time."""
    scaling = config.get("rope_scaling") or {}
    frequency = 1.0 / config["rope_theta"] ** (2 * i / config["head_dim"])
    if scaling.get("rope_type") == "linear":
        return frequency / scaling["factor"]
    if scaling.get("rope_type") != "llama3":
        return frequency
    wavelength, original = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def reference_logits(config: dict, weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """float64 [T, V] of one prompt, token by token and head by head."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    heads, kv_heads, hd = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def normed(heads, name):
        return norm(heads, name) if f"{name}.weight" in w else heads

    def rotated(vector, position):
        out = np.empty(hd)
        for i in range(hd // 2):
            pair = complex(vector[i], vector[i + hd // 2]) * np.exp(1j * position * rope_angle(config, i))
            out[i], out[i + hd // 2] = pair.real, pair.imag
        return out

    def gated(x, at):
        gate = linear(x, f"{at}.gate_proj")
        return linear(gate / (1 + np.exp(-gate)) * linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def routed(x, at):
        out = np.zeros_like(x)
        for t in range(len(x)):
            scores = np.exp(linear(x[t], f"{at}.gate"))
            scores /= scores.sum()
            chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[: config["num_experts_per_tok"]]
            total = sum(scores[e] for e in chosen) if config["norm_topk_prob"] else 1.0
            for e in chosen:
                out[t] += scores[e] / total * gated(x[t], f"{at}.experts.{e}")
        return out

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{p}_proj").reshape(len(ids), -1, hd) for p in "qkv")
        q, k = normed(q, f"{at}.self_attn.q_norm"), normed(k, f"{at}.self_attn.k_norm")
        attended = np.zeros((len(ids), heads, hd))
        for t in range(len(ids)):
            for head in range(heads):
                group = head // (heads // kv_heads)
                query = rotated(q[t, head], t)
                scores = np.array([query @ rotated(k[s, group], s) for s in range(t + 1)]) / math.sqrt(hd)
                p = np.exp(scores - scores.max())
                attended[t, head] = (p / p.sum()) @ v[: t + 1, group]
        x = x + linear(attended.reshape(len(ids), -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        x = x + (routed(h, f"{at}.mlp") if f"{at}.mlp.gate.weight" in w else gated(h, f"{at}.mlp"))
    head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head_name].T


def run_dense(model, prompts):
    """Logits and hidden states of all tokens of `prompts` in one batch, and the cache."""
    context = DenseContext.of_lengths([len(p) for p in prompts])

    @jax.jit
    def run(ids):
        hidden, cache = model(ids, context, context.cache(model))
        return model.logits(hidden), hidden, cache

    return run(np.concatenate(prompts).astype(np.int32))


CASES = {
    "llama2": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "tied, grouped queries": {},
    "one KV head, wide heads": {"num_key_value_heads": 1, "head_dim": 16},
    "llama3 scaling": {"rope_scaling": LLAMA3, "tie_word_embeddings": False},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "rope_theta": 1e6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "rope_theta": 1e6},
    "qwen3, biases, no tie": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": True,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 16,
    },
    "qwen3 moe": {**MOE, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen3 moe, one of five experts": {
        **MOE,
        "num_experts": 5,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
    "qwen3 moe, all experts, biases": {
        **MOE,
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "qwen3 moe, dense layers": {
        **MOE,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "max_window_layers": 1, "sliding_window": None},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_logits_equal_the_float64_forward(tmp_path, name, stored):
    """Two prompts in one batch, each as if it were alone. Stored in bfloat16, computed in float32."""
    changes = CASES[name]
    loaded = registry.load(EngineConfig(model_path=str(make_hf_dir(tmp_path, dtype=stored, **changes))))
    config = {**TINY_CONFIG, **changes}
    weights = tiny_weights(config, dtype=ml_dtypes.bfloat16 if stored == "bfloat16" else np.float32)
    prompts = [[5, 250, 17, 17, 3, 99, 0, 42, 8], [271, 1, 60]]
    logits = np.asarray(run_dense(loaded.module, prompts)[0])
    expected = np.concatenate([reference_logits(config, weights, p) for p in prompts])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_bfloat16_compute(tmp_path):
    """The engine's dtype setting reaches parameters, cache and activations; logits stay float32."""
    loaded = registry.load(EngineConfig(model_path=str(make_hf_dir(tmp_path)), dtype="bfloat16"))
    logits, hidden, cache = run_dense(loaded.module, [[0, 1, 2, 3]])
    assert {hidden.dtype, cache[0].dtype, loaded.module.embedding[...].dtype} == {jnp.dtype("bfloat16")}
    assert logits.dtype == jnp.float32
    expected = reference_logits(TINY_CONFIG, tiny_weights(TINY_CONFIG), [0, 1, 2, 3])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=0.05 * np.abs(expected).max())


def test_paged_chunks_and_steps_equal_the_float64_forward(tmp_path):
    """Two prompts over scattered pages: cut in two chunks, then one token each, as prefill and decode do it."""
    model = registry.load(EngineConfig(model_path=str(make_hf_dir(tmp_path)))).module
    prompts = [[5, 250, 17, 17, 3, 99, 0, 42, 8], [271, 1, 60, 4, 9, 77, 30]]
    page_size, num_pages = 4, 10
    pages = np.random.default_rng(1).permutation(np.arange(1, num_pages + 1)).reshape(2, 5)
    num_locs = (num_pages + 1) * page_size
    cache = tuple(jnp.zeros(s.shape, s.dtype) for s in model.cache_shapes(num_locs))

    @jax.jit
    def step(ids, context, cache):
        hidden, cache = model(ids, context, cache)
        return model.logits(hidden[context.last_tokens]), cache

    rows = []
    for starts, lens in [([0, 0], [5, 2]), ([5, 2], [3, 4]), ([8, 6], [1, 1])]:
        context = paged_context(pages, starts, lens, page_size, num_locs)
        ids = np.concatenate([p[s : s + n] for p, s, n in zip(prompts, starts, lens)]).astype(np.int32)
        logits, cache = step(ids, context, cache)
        rows.append(np.asarray(logits))
    expected = [reference_logits(TINY_CONFIG, tiny_weights(TINY_CONFIG), p) for p in prompts]
    for got, ends in zip(rows, [(4, 1), (7, 5), (8, 6)]):
        for row in range(2):
            np.testing.assert_allclose(got[row], expected[row][ends[row]], rtol=0, atol=1e-4)


def paged_context(pages, starts, lens, page_size, num_locs):
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lens)])
    token_rows = np.repeat(np.arange(len(lens)), lens)
    locs = pages[token_rows, positions // page_size] * page_size + positions % page_size
    q_starts = np.cumsum([0, *lens[:-1]])
    arrays = {
        "positions": positions,
        "token_rows": token_rows,
        "token_locs": locs,
        "page_table": pages,
        "seq_lens": np.add(starts, lens),
        "q_starts": q_starts,
        "extend_lens": lens,
        "last_tokens": q_starts + lens - 1,
    }
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    kernels = Kernels.choose("auto", "cpu")
    return PagedContext(
        **arrays, page_size=page_size, num_locs=num_locs, is_decode=all(n == 1 for n in lens), kernels=kernels
    )


@pytest.mark.demo
@pytest.mark.slow
def test_goldens_teacher_forced(demo_model):
    """All 20 prompts with their answers in one batch: each next token and its log-probability as torch gave them."""
    loaded = registry.load(EngineConfig(model_path=str(demo_model), dtype="float32"))
    sequences = [case["prompt_ids"] + case["output_ids"][:-1] for case in GOLDENS]
    asked = [np.arange(len(s) - len(c["output_ids"]), len(s)) for s, c in zip(sequences, GOLDENS)]
    starts = np.cumsum([0] + [len(s) for s in sequences[:-1]])
    context = DenseContext.of_lengths([len(s) for s in sequences])
    where = np.concatenate([start + a for start, a in zip(starts, asked)])
    expected = np.concatenate([c["output_ids"] for c in GOLDENS])

    graph, weights = nnx.split(loaded.module)

    @jax.jit
    def run(weights, ids):
        model = nnx.merge(graph, weights)
        hidden, _ = model(ids, context, context.cache(model))
        logits = model.logits(hidden[where])
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), expected[:, None], axis=1)[:, 0]
        return jnp.argmax(logits, axis=1), logprobs

    tokens, logprobs = run(weights, np.concatenate(sequences).astype(np.int32))
    assert len(expected) == 831
    assert int((np.asarray(tokens) == expected).sum()) == 831
    np.testing.assert_allclose(logprobs, np.concatenate([c["logprob"] for c in GOLDENS]), rtol=0, atol=1e-3)


def parse(family=llama_config, **changes):
    return family(Fields({**TINY_CONFIG, **changes}, "config.json"), "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be an int, not '32'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, not 0"),
        ({"vocab_size": True}, "vocab_size must be an int, not True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide num_attention_heads 4"),
        ({"head_dim": None, "hidden_size": 34}, "hidden_size 34 must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even, not 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": 1}, "attention_bias must be a bool, not 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .* is not supported"),
        ({"eos_token_id": ["x"]}, "eos_token_id must hold token ids, not 'x'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
            "rope_scaling: original_max_position_embeddings is missing",
        ),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 5}}, "low_freq_factor 5.0 must be above 0 and below"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope_type 'longrope' is not supported"),
    ],
)
def test_config_errors_name_the_field(changes, message):
    with pytest.raises(CheckpointError, match=f"config.json.*{message}"):
        parse(**changes)


def test_config_defaults_of_each_family():
    absent = {"num_key_value_heads": None, "max_position_embeddings": None, "rope_theta": None, "head_dim": None}
    llama = parse(**absent)
    assert (llama.num_kv_heads, llama.max_position_embeddings, llama.rope.theta, llama.head_dim) == (4, 2048, 1e4, 8)
    mistral = parse(mistral_config, **absent, num_attention_heads=16, sliding_window=64)
    assert (mistral.num_kv_heads, mistral.max_position_embeddings, mistral.sliding_window) == (8, 131072, 64)


def test_qwens_window_counts_only_where_it_is_switched_on():
    assert parse(qwen2_config, sliding_window=64).sliding_window is None
    assert parse(qwen2_config, sliding_window=64, use_sliding_window=True).sliding_window == 64
    absent = {name: v for name, v in TINY_CONFIG.items() if name not in ("head_dim", "max_position_embeddings")}
    qwen3 = qwen3_config(Fields(absent, "config.json"), "float32")
    assert (qwen3.head_dim, qwen3.max_position_embeddings, qwen3.qkv_bias, qwen3.qk_norm) == (128, 32768, False, True)
    qwen2 = qwen2_config(Fields(absent, "config.json"), "float32")
    assert (qwen2.head_dim, qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (8, True, False, False)


def test_rope_parameters_hold_theta_and_scaling():
    newer = parse(rope_theta=None, rope_parameters={"rope_theta": 5e5, **LLAMA3})
    assert newer.rope == parse(rope_theta=5e5, rope_scaling=LLAMA3).rope
    assert newer.rope.theta == 5e5


def test_linear_scaling_stretches_the_context():
    assert parse(rope_scaling={"type": "linear", "factor": 4.0}).max_position_embeddings == 1024
    assert parse(rope_scaling=LLAMA3).max_position_embeddings == 256
