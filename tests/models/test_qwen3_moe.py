"""The mixture of experts against loops over tokens and experts in float64, its configuration and its tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights
from safetensors.numpy import load_file, save_file
from test_llama import CASES, reference_logits, run_dense

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry
from jaxoverlap.models.layers import GatedMLP, MoeConfig
from jaxoverlap.models.moe import SparseMLP
from jaxoverlap.models.qwen3_moe import qwen3_moe_config

HIDDEN, SIZE, TOKENS = 16, 12, 13
KINDS = {
    "two of four": MoeConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=SIZE),
    "two of four, normed": MoeConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=SIZE, norm_topk_prob=True),
    "one of seven": MoeConfig(num_experts=7, num_experts_per_tok=1, intermediate_size=SIZE),
    "all of three": MoeConfig(num_experts=3, num_experts_per_tok=3, intermediate_size=SIZE, norm_topk_prob=True),
    "the only one": MoeConfig(num_experts=1, num_experts_per_tok=1, intermediate_size=SIZE),
    "more experts than tokens": MoeConfig(num_experts=40, num_experts_per_tok=8, intermediate_size=SIZE),
}


def arrays(config, seed=0):
    rng = np.random.default_rng(seed)
    e, i = config.num_experts, config.intermediate_size
    shapes = {"router": (e, HIDDEN), "gate_up": (e, 2 * i, HIDDEN), "down": (e, HIDDEN, i)}
    drawn = {name: rng.standard_normal(shape) * 1.5 * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: x.astype(np.float32) for name, x in drawn.items()}


def tokens(seed=1):
    return np.random.default_rng(seed).standard_normal((TOKENS, HIDDEN)).astype(np.float32)


def reference(config, weights, x):
    """float64 [T, H], a token and an expert at a time."""
    router, gate_up, down = (weights[name].astype(np.float64) for name in ("router", "gate_up", "down"))
    out = np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        scores = np.exp(router @ token)
        scores /= scores.sum()
        chosen = sorted(range(config.num_experts), key=lambda e: -scores[e])[: config.num_experts_per_tok]
        total = scores[chosen].sum() if config.norm_topk_prob else 1.0
        for e in chosen:
            gate, up = (gate_up[e] @ token).reshape(2, -1)
            out[t] += scores[e] / total * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def run(config, weights, x, implementation="xla"):
    """The block, compiled, on arrays of whatever size."""
    graph, state = nnx.split(nnx.eval_shape(lambda: SparseMLP(config, HIDDEN, "float32", implementation)))
    for name, array in weights.items():
        state[name].set_value(jnp.asarray(array))
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x))


def check(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))


IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("kind", KINDS)
def test_equals_loops_over_tokens_and_experts(kind, implementation):
    config = KINDS[kind]
    weights, x = arrays(config), tokens()
    check(run(config, weights, x, implementation), reference(config, weights, x))


def test_all_tokens_to_the_same_experts():
    """Most experts get no token, one gets all."""
    config = KINDS["two of four, normed"]
    weights, x = arrays(config), np.abs(tokens())
    weights["router"][:] = np.array([-1, 3, -2, 2])[:, None] / HIDDEN
    check(run(config, weights, x), reference(config, weights, x))


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_slices_of_the_experts_sum_to_the_whole(shards):
    """Each device holds the same rows of gate and of up, and those columns of down."""
    config = KINDS["two of four, normed"]
    weights, x = arrays(config), tokens()
    gate, up = np.split(weights["gate_up"], 2, axis=1)
    total = np.zeros(x.shape)
    for part in np.split(np.arange(SIZE), shards):
        slices = {"gate_up": np.concatenate([gate[:, part], up[:, part]], axis=1), "down": weights["down"][..., part]}
        total += run(config, weights | slices, x)
    check(total, reference(config, weights, x))


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [0.0, 1e30, np.nan])
def test_other_tokens_change_no_bit(value, implementation):
    """Padding, or whatever the rest of the batch is."""
    config = KINDS["two of four, normed"]
    weights, x = arrays(config), tokens()
    alone = run(config, weights, x, implementation)
    mine = np.array([0, 3, 4, 11])
    other = np.full_like(x, value)
    other[mine] = x[mine]
    np.testing.assert_array_equal(run(config, weights, other, implementation)[mine], alone[mine])
    order = np.random.default_rng(2).permutation(TOKENS)
    np.testing.assert_array_equal(run(config, weights, x[order], implementation), alone[order])


def test_bfloat16_is_kept():
    config = KINDS["two of four, normed"]
    weights = {name: array.astype(jnp.bfloat16) for name, array in arrays(config).items()}
    x = tokens().astype(jnp.bfloat16)
    got = run(config, weights, x)
    assert got.dtype == jnp.bfloat16
    expected = reference(config, weights, x)
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=0, atol=0.02 * np.abs(expected).max())


def parse(**changes):
    fields = {**TINY_CONFIG, **CASES["qwen3 moe, dense layers"], **changes}
    return qwen3_moe_config(Fields(fields, "config.json"), "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, not 0"),
        ({"num_experts": "6"}, "num_experts must be an int, not '6'"),
        ({"num_local_experts": 7}, "num_local_experts 7 differs from num_experts 6"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is above num_experts 6"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1, not 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be a bool, not 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, not 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of ints, not 1"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers must hold ints of at least 0, not -1"),
        ({"mlp_only_layers": [0, 4]}, "mlp_only_layers names layer 4, num_hidden_layers is 4"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* is not supported"),
    ],
)
def test_config_errors_name_the_field(changes, message):
    with pytest.raises(CheckpointError, match=f"config.json.*{message}"):
        parse(**changes)


def test_config_defaults():
    absent = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    values = {name: v for name, v in TINY_CONFIG.items() if name not in absent}
    config = qwen3_moe_config(Fields(values, "config.json"), "float32")
    assert config.moe == MoeConfig(num_experts=128, num_experts_per_tok=8, intermediate_size=768)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 8, 32768)
    assert (config.qkv_bias, config.output_bias, config.qk_norm, config.sliding_window) == (False, False, True, None)
    assert parse(use_sliding_window=True, sliding_window=64).sliding_window == 64


def test_newer_configs_call_the_experts_local():
    assert parse(num_experts=None, num_local_experts=6) == parse()
    assert parse(num_local_experts=6) == parse()


@pytest.mark.parametrize(
    ("step", "only", "dense"),
    [(1, [], ()), (1, None, ()), (1, [3, 0], (0, 3)), (2, [], (0, 2)), (2, [1], (0, 1, 2)), (3, [], (0, 1, 3))],
)
def test_which_layers_are_dense(step, only, dense):
    config = parse(decoder_sparse_step=step, mlp_only_layers=only)
    assert config.moe.dense_layers == dense


def load(directory, **config):
    return registry.load(EngineConfig(model_path=str(directory), **config))


DENSE = CASES["qwen3 moe, dense layers"]  # of four layers only the last one has experts
AT = "model.layers.3.mlp"


def test_parameters_are_the_tensors(tmp_path):
    model = load(make_hf_dir(tmp_path, **DENSE)).module
    w = tiny_weights({**TINY_CONFIG, **DENSE})
    assert [type(layer.mlp) for layer in model.layers] == [GatedMLP] * 3 + [SparseMLP]
    mlp = model.layers[3].mlp
    np.testing.assert_array_equal(mlp.router[...], w[f"{AT}.gate.weight"])
    for e in range(6):
        gate, up, down = (w[f"{AT}.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        np.testing.assert_array_equal(mlp.gate_up[...][e], np.concatenate([gate, up]))
        np.testing.assert_array_equal(mlp.down[...][e], down)
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model))) == sum(x.size for x in w.values())


@pytest.mark.parametrize(("setting", "chosen"), [("auto", "xla"), ("xla", "xla"), ("interpret", "interpret")])
def test_the_setting_kernels_reaches_the_experts(tmp_path, setting, chosen):
    model = load(make_hf_dir(tmp_path, **DENSE), kernels=setting).module
    assert model.layers[3].mlp.implementation == chosen
    prompt = [5, 250, 17, 3]
    expected = reference_logits({**TINY_CONFIG, **DENSE}, tiny_weights({**TINY_CONFIG, **DENSE}), prompt)
    np.testing.assert_allclose(run_dense(model, [prompt])[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name", [f"{AT}.experts.5.up_proj.weight", f"{AT}.experts.0.down_proj.weight", f"{AT}.gate.weight"]
)
def test_missing_tensor(tmp_path, name):
    make_hf_dir(tmp_path, **DENSE)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", [f"{AT}.experts.6.up_proj.weight", f"{AT}.up_proj.weight", "model.layers.0.mlp.gate.weight"]
)
def test_unknown_tensor(tmp_path, name):
    """One expert more than the config says; an MLP where there are experts, and the other way round."""
    make_hf_dir(tmp_path, **DENSE)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: np.zeros((24, 32), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name} is unknown to this model"):
        load(tmp_path)


def test_wrong_shape(tmp_path):
    make_hf_dir(tmp_path, **DENSE)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"{AT}.experts.2.down_proj.weight"
    save_file(tensors | {name: np.zeros((24, 32), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[24, 32\], the model needs \[32, 24\]"):
        load(tmp_path)


def test_weights_of_another_routing_are_refused(tmp_path):
    served = load(make_hf_dir(tmp_path / "a", **DENSE))
    other = make_hf_dir(tmp_path / "b", **{**DENSE, "norm_topk_prob": False})
    with pytest.raises(CheckpointError, match=r"moe is MoeConfig\(.*norm_topk_prob=False"):
        registry.read_weights(served, other)
    read = registry.read_weights(served, make_hf_dir(tmp_path / "c", seed=1, **DENSE))
    assert read["layers.3.mlp.gate_up"].shape == (6, 48, 32)
