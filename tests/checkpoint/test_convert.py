"""Hugging Face -> Orbax -> Hugging Face: every tensor as it was, whatever the first directory looked like."""

import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxoverlap.checkpoint.convert import convert, to_hf
from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.cli import main
from jaxoverlap.models import registry
from jaxoverlap.models.decoder import IGNORED_TENSORS

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}
KINDS = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "dtype": "bfloat16"},
    "qwen3 moe": MOE,
    "qwen3 moe, sharded": {**MOE, "shards": 3, "dtype": "bfloat16"},
    "sharded": {"shards": 3},
}


def tensors_of(directory):
    """{name: (safetensors' dtype, array)} over all files, read by safetensors alone."""
    out = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                out[name] = (file.get_slice(name).get_dtype(), file.get_tensor(name))
    return out


def check_same_tensors(a, b):
    first, second = tensors_of(a), tensors_of(b)
    assert first.keys() == second.keys()
    for name, (dtype, array) in first.items():
        assert second[name][0] == dtype
        assert second[name][1].shape == array.shape
        assert second[name][1].tobytes() == array.tobytes(), name


def there_and_back(source, folder, **options):
    tree = registry.parameter_tree(source)
    convert(source, folder / "orbax", tree, ignored=IGNORED_TENSORS)
    to_hf(folder / "orbax", folder / "back", tree, **options)
    return folder / "back"


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(tmp_path, kind):
    source = make_hf_dir(tmp_path / "hf", generation={"eos_token_id": 5}, **KINDS[kind])
    (source / "LICENSE").write_text("as it was")
    (source / "pytorch_model.bin").write_text("weights in a format that is not read stay behind")
    back = there_and_back(source, tmp_path)
    check_same_tensors(source, back)
    files = {"LICENSE", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in back.iterdir()} == files | {"model.safetensors"}
    assert {path.name for path in (tmp_path / "orbax").iterdir()} == files | {"weights"}
    for name in files:
        assert (back / name).read_bytes() == (source / name).read_bytes()


def test_dtypes_that_differ_within_a_fused_parameter(tmp_path):
    """q in bfloat16, k in float16, v in float32; norms in float32 beside bfloat16 weights; a head beside a tied one."""
    source = make_hf_dir(tmp_path / "hf", dtype="bfloat16")
    tensors = load_file(source / "model.safetensors")
    exact = tiny_weights(TINY_CONFIG, seed=1)
    at = "model.layers.0.self_attn"
    tensors[f"{at}.k_proj.weight"] = exact[f"{at}.k_proj.weight"].astype(np.float16)
    tensors[f"{at}.v_proj.weight"] = exact[f"{at}.v_proj.weight"]
    tensors["model.norm.weight"] = exact["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert tensors[f"{at}.q_proj.weight"].dtype == ml_dtypes.bfloat16
    save_file(tensors, source / "model.safetensors")
    check_same_tensors(source, there_and_back(source, tmp_path))


def test_tables_that_the_model_computes_stay_behind(tmp_path):
    source = make_hf_dir(tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file({**tensors, **table}, source / "model.safetensors")
    assert tensors_of(there_and_back(source, tmp_path)).keys() == tensors.keys()


def test_large_models_are_written_in_shards(tmp_path):
    source = make_hf_dir(tmp_path / "hf")
    limit = 20_000
    back = there_and_back(source, tmp_path, shard_bytes=limit)
    check_same_tensors(source, back)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in back.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    sizes = {}
    for name, (_, array) in tensors_of(back).items():
        sizes.setdefault(index["weight_map"][name], []).append(array.nbytes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert all(sum(of) <= limit or len(of) == 1 for of in sizes.values())
    assert max(map(sum, sizes.values())) > limit  # the embedding alone is larger
    assert registry.load_directory(back, registry.EngineConfig(model_path=str(back))).module is not None


def test_a_trained_checkpoint_without_notes_on_its_tensors(tmp_path):
    """Saved by a trainer, not by a conversion: tensors get the parameters' dtypes, and no duplicate head."""
    import orbax.checkpoint as ocp

    source = make_hf_dir(tmp_path / "hf")
    convert(source, tmp_path / "orbax", registry.parameter_tree(source))
    weights = tmp_path / "orbax" / "weights"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(weights, checkpointer.restore(weights), force=True)
    convert(tmp_path / "orbax", tmp_path / "back", registry.parameter_tree(source))
    check_same_tensors(source, tmp_path / "back")


@pytest.mark.parametrize("broken", ["source", "orbax"])
def test_a_conversion_that_fails_leaves_the_former_checkpoint(tmp_path, broken):
    source = make_hf_dir(tmp_path / "hf")
    back = there_and_back(source, tmp_path)
    if broken == "source":
        tensors = load_file(source / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, source / "model.safetensors")
        before = tensors_of(back)
        with pytest.raises(CheckpointError, match=r"tensor model.norm.weight is missing"):
            convert(source, back, registry.parameter_tree(source))
    else:
        for path in (tmp_path / "orbax" / "weights" / "ocdbt.process_0" / "d").iterdir():
            path.write_bytes(path.read_bytes()[:100])
        before = tensors_of(back)
        with pytest.raises(CheckpointError, match=r"parameter .* cannot be read"):
            convert(tmp_path / "orbax", back, registry.parameter_tree(source))
    assert tensors_of(back).keys() == before.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "orbax", "back"}


def test_the_source_is_never_the_destination(tmp_path):
    source = make_hf_dir(tmp_path / "models" / "hf")
    for destination in (source, tmp_path / "models", source / ".." / "hf"):
        with pytest.raises(CheckpointError, match="choose another destination"):
            convert(source, destination, registry.parameter_tree(source))


def test_command(tmp_path, capsys):
    source = make_hf_dir(tmp_path / "hf")
    for a, b in ((source, tmp_path / "orbax"), (tmp_path / "orbax", tmp_path / "back")):
        assert main(["checkpoint", "convert", str(a), str(b)]) == 0
        assert capsys.readouterr().out == f"{b}\n"
    check_same_tensors(source, tmp_path / "back")
    assert main(["checkpoint", "convert", str(source), str(source)]) == 1
    assert "choose another destination" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(tmp_path / "no"), str(tmp_path / "x")]) == 1
    assert "no' is no directory, and not one of" in capsys.readouterr().err


def test_the_command_leaves_accelerators_alone(tmp_path):
    """In a process of its own it asks JAX for the CPU only."""
    source = make_hf_dir(tmp_path / "hf")
    code = """if True:
        import os, sys
        from jaxoverlap.cli import main
        code = main(["checkpoint", "convert", *sys.argv[1:]])
        assert os.environ["JAX_PLATFORMS"] == "cpu"
        sys.exit(code)
    """
    environ = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "orbax")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.demo
def test_the_demo_model_there_and_back(tmp_path, demo_model):
    check_same_tensors(demo_model, there_and_back(demo_model, tmp_path))
