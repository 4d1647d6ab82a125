"""GGUF to a Hugging Face directory."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers_gguf import write_gguf
from safetensors.numpy import load_file

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.gguf import convert
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry
from jaxoverlap.tokenizer import Tokenizer


def converted(tmp_path, **changes):
    source, out = tmp_path / "model.gguf", tmp_path / "out"
    out.mkdir()
    weights = write_gguf(source, changes.pop("config", {}), **changes)
    convert(source, out)
    return weights, out


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_come_back(tmp_path, tied):
    """Under the checkpoint's names, rotary rows in its order, rounded to bfloat16."""
    weights, out = converted(tmp_path, config={"tie_word_embeddings": tied})
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(tensors[name], weight.astype(ml_dtypes.bfloat16), err_msg=name)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == tied


def test_quantised_blocks_are_expanded(tmp_path):
    """Q8_0 keeps a block's largest value to one part in 127; rounding to bfloat16 adds one in 256."""
    weights, out = converted(tmp_path, quantised=True)
    tensors = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        error = np.abs(tensors[name].astype(np.float64) - weight).max() / np.abs(weight).max()
        assert error < 1 / 127
    assert np.any(tensors["model.layers.0.mlp.up_proj.weight"] != weights["model.layers.0.mlp.up_proj.weight"])


def test_directory_loads(tmp_path):
    _, out = converted(tmp_path)
    loaded = registry.load(EngineConfig(model_path=str(out)))
    config = loaded.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (4, 2, 8, 2)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 48, 14)
    assert (config.rms_norm_eps, config.rope.theta, config.eos_token_ids) == (1e-5, 1e4, (2,))
    assert loaded.context_length == 256


def test_tokenizer(tmp_path):
    """Merges apply in order, digits stand alone, control tokens are special."""
    _, out = converted(tmp_path)
    tokenizer = Tokenizer.from_dir(out)
    assert tokenizer.encode("abcd 12<|im_end|>") == [10, 8, 11, 12, 2]
    assert tokenizer.decode([10, 8, 11, 12, 2]) == "abcd 12"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == "<|im_start|>ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"pre": "mystery"}, "tokenizer.ggml.pre 'mystery' is not supported"),
        ({"extra_tensor": "blk.0.attn_sinks.weight"}, "tensor blk.0.attn_sinks.weight is unknown"),
        ({"extra_tensor": "rope_freqs.weight"}, "tensor rope_freqs.weight is unknown"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, **changes)


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"something else, but long enough to be read as a header")
    with pytest.raises(CheckpointError, match=r"x.gguf: not a readable GGUF file"):
        convert(tmp_path / "x.gguf", tmp_path)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'needs the package gguf: pip install "jaxoverlap\[demo\]"'):
        convert(tmp_path / "x.gguf", tmp_path)
