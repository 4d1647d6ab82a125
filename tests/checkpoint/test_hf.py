"""safetensors into parameters: what is right loads bit for bit, what is wrong is named."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights
from safetensors.numpy import load_file, save_file

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.parts import Part, fused, stacked
from jaxoverlap.checkpoint.tree import check_cover
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

Q = "model.layers.1.self_attn.q_proj.weight"


def load(directory, **config):
    return registry.load(EngineConfig(model_path=str(directory), **config))


def rewrite(directory, change):
    """Applies `change` to the dictionary of tensors in model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_parameters_are_the_tensors(tmp_path):
    """Fused weights are the rows of q, k, v and of gate, up in that order; nothing else changes a value."""
    model = load(make_hf_dir(tmp_path, attention_bias=True, tie_word_embeddings=False)).module
    w = tiny_weights({**TINY_CONFIG, "attention_bias": True, "tie_word_embeddings": False})
    layer, at = model.layers[1], "model.layers.1"

    def stacked(kind, *names):
        return np.concatenate([w[f"{at}.{name}.{kind}"] for name in names])

    qkv = [f"self_attn.{p}_proj" for p in "qkv"]
    np.testing.assert_array_equal(layer.attention.qkv.weight[...], stacked("weight", *qkv))
    np.testing.assert_array_equal(layer.attention.qkv.bias[...], stacked("bias", *qkv))
    np.testing.assert_array_equal(layer.attention.output.bias[...], stacked("bias", "self_attn.o_proj"))
    np.testing.assert_array_equal(layer.mlp.gate_up.weight[...], stacked("weight", "mlp.gate_proj", "mlp.up_proj"))
    np.testing.assert_array_equal(layer.mlp.down.weight[...], stacked("weight", "mlp.down_proj"))
    np.testing.assert_array_equal(layer.mlp_norm.weight[...], stacked("weight", "post_attention_layernorm"))
    np.testing.assert_array_equal(model.embedding[...], w["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.head[...], w["lm_head.weight"])
    leaves = jax.tree.leaves(nnx.state(model))
    assert sum(x.size for x in leaves) == sum(x.size for x in w.values())


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_stored_dtypes_become_the_setting(tmp_path, stored):
    directory = make_hf_dir(tmp_path, dtype=stored)
    kind = ml_dtypes.bfloat16 if stored == "bfloat16" else np.dtype(stored)
    expected = tiny_weights(TINY_CONFIG, dtype=kind)["model.norm.weight"]
    auto = load(directory).module.norm.weight[...]  # on CPU: float32
    assert auto.dtype == np.float32
    np.testing.assert_array_equal(auto, expected.astype(np.float32))
    half = load(directory, dtype="bfloat16").module.norm.weight[...]
    np.testing.assert_array_equal(half, expected.astype(ml_dtypes.bfloat16))


def test_auto_dtype_on_an_accelerator_is_the_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load(make_hf_dir(tmp_path / "a", dtype="bfloat16")).config.dtype == "bfloat16"
    with pytest.raises(CheckpointError, match=r"dtype 'float16' is not computed in: set the setting dtype"):
        load(make_hf_dir(tmp_path / "b", dtype="float16"))


def test_shards_load_like_one_file(tmp_path):
    one, three = load(make_hf_dir(tmp_path / "one")), load(make_hf_dir(tmp_path / "three", shards=3))
    (tmp_path / "three" / "unlisted.safetensors").write_bytes(b"not in the index: not read")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one.module), nnx.state(three.module))


def test_several_files_without_an_index(tmp_path):
    directory = make_hf_dir(tmp_path, shards=2)
    (directory / "model.safetensors.index.json").unlink()
    (directory / "consolidated.safetensors").write_bytes(b"the same weights under other names")
    assert load(directory).module is not None


def test_progress_counts_to_the_end(tmp_path):
    seen = []
    config = EngineConfig(model_path=str(make_hf_dir(tmp_path)))
    registry.load(config, progress=lambda *report: seen.append(report))
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts)
    assert seen[-1][1] == seen[-1][2] == sum(w.size for w in tiny_weights(TINY_CONFIG).values())


@pytest.mark.parametrize("name", [Q, "model.norm.weight", "model.embed_tokens.weight"])
def test_missing_tensor(tmp_path, name):
    directory = make_hf_dir(tmp_path)
    rewrite(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load(directory)


def test_missing_head_of_an_untied_model(tmp_path):
    directory = make_hf_dir(tmp_path, tie_word_embeddings=False)
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight is missing"):
        load(directory)


def test_missing_bias(tmp_path):
    directory = make_hf_dir(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    with pytest.raises(CheckpointError, match=r"tensor model.layers.0.self_attn.q_proj.bias is missing"):
        load(directory)


@pytest.mark.parametrize("shape", [(32, 31), (16, 32), (32,), (32, 32, 1)])
def test_wrong_shape(tmp_path, shape):
    directory = make_hf_dir(tmp_path)
    rewrite(directory, lambda tensors: tensors.update({Q: np.zeros(shape, np.float32)}))
    with pytest.raises(CheckpointError, match=rf"tensor {Q} has shape \[{str(list(shape))[1:-1]}\].*needs \[32, 32\]"):
        load(directory)


def test_transposed_weight_is_a_wrong_shape(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    directory = make_hf_dir(tmp_path)
    rewrite(directory, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].T)}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[48, 32\], the model needs \[32, 48\]"):
        load(directory)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"])
def test_unknown_tensor(tmp_path, name):
    """A layer too many, a bias that the configuration denies, anything else."""
    directory = make_hf_dir(tmp_path)
    rewrite(directory, lambda tensors: tensors.update({name: np.zeros((32,), np.float32)}))
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {name} is unknown to this model"):
        load(directory)


def test_wrong_dtype(tmp_path):
    directory = make_hf_dir(tmp_path)
    rewrite(directory, lambda tensors: tensors.update({Q: np.zeros((32, 32), np.int8)}))
    with pytest.raises(CheckpointError, match=f"tensor {Q} has dtype I8, only BF16, F16, F32 are read"):
        load(directory)


def test_known_extras(tmp_path):
    """Rotary tables are left aside; a tied head is allowed where it equals the embedding, and else named."""
    directory = make_hf_dir(tmp_path)
    rewrite(
        directory,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
                "lm_head.weight": t["model.embed_tokens.weight"].copy(),
            }
        ),
    )
    assert load(directory).module.head is None
    rewrite(directory, lambda t: t["lm_head.weight"].__setitem__((3, 4), 0.125))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load(directory)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(tmp_path, keep):
    directory = make_hf_dir(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a whole safetensors file \(\d+ bytes\)"):
        load(directory)


def test_broken_index(tmp_path):
    directory = make_hf_dir(tmp_path, shards=2)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "lost.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors: tensor lost.weight is missing"):
        load(directory)
    index.write_text(json.dumps({"weight_map": {**weight_map, Q: "elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names elsewhere.safetensors, which is absent"):
        load(directory)
    index.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(CheckpointError, match=r"index.json: weight_map must map tensor names to file names"):
        load(directory)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json: not readable as JSON"):
        load(directory)


def test_tensor_in_two_files(tmp_path):
    directory = make_hf_dir(tmp_path, shards=2)
    (directory / "model.safetensors.index.json").unlink()
    save_file({Q: np.zeros((32, 32), np.float32)}, directory / "z.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {Q} is in model-0000.* and in z.safetensors"):
        load(directory)


def test_directory_without_weights(tmp_path):
    directory = make_hf_dir(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        load(directory)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": (Part("x"),)}, "parameter b is filled by no tensor"),
        ({"a": (Part("x"),), "b": (Part("y"),), "c": (Part("z"),)}, "parameter c is not in the model"),
        ({"a": fused(["x", "y"], [2, 1]), "b": (Part("z"),)}, "parameter a: its tensors fill 3 rows of 4"),
        ({"a": (Part("x", 0, 2), Part("y", 1, 4)), "b": (Part("z"),)}, "parameter a: y starts at row 1, not 2"),
    ],
)
def test_a_model_must_say_where_every_row_comes_from(parts, message):
    """A family whose parts() leave a row out, or fill one twice, is caught before anything is read."""
    shapes = {name: jax.ShapeDtypeStruct((4, 2), np.float32) for name in "ab"}
    with pytest.raises(CheckpointError, match=message):
        check_cover(shapes, parts)


X, Y = fused(["x0", "x1"], [2, 1]), (Part("y"),)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (stacked([X]), r"parameter a: its tensors fill 0 rows of 3 at \[1\]"),
        (stacked([X, X[:1]]), r"parameter a: its tensors fill 2 rows of 3 at \[1\]"),
        (stacked([X, Y, Y]), r"parameter a: y lies at \[2\], outside \[2, 3, 4\]"),
        (stacked([X, X + Y]), "parameter a: y starts at row 0, not 3"),
        (stacked([X]) + Y, r"parameter a: y lies at \[\], outside \[2, 3, 4\]"),
    ],
)
def test_nor_may_it_leave_one_out_of_an_array_of_several(parts, message):
    """Each of several arrays in one parameter is made of tensors of its own."""
    shapes = {"a": jax.ShapeDtypeStruct((2, 3, 4), np.float32)}
    check_cover(shapes, {"a": stacked([X, Y])})
    check_cover(shapes, {"a": stacked([stacked([(Part(f"{i}{j}"),) for j in range(3)]) for i in range(2)])})
    with pytest.raises(CheckpointError, match=message):
        check_cover(shapes, {"a": parts})
