"""GGUF to a Hugging Face directory: `llama` architecture, byte-level BPE vocabulary. Needs the extra `demo`.

Quantised weights are expanded once and stored as bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.progress import Report, silent

CONTROL_TOKEN = 3  # GGUF's token type
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, directory: Path, *, progress: Report | None = None) -> None:
    """Writes model.safetensors, config.json, generation_config.json, tokenizer files and the chat template.

    Raises CheckpointError naming what the file holds that is not understood, ImportError naming the extra.
    """
    reader = _reader(source)
    get = _getter(reader, source)
    if (architecture := get("general.architecture")) != "llama":
        raise CheckpointError(f"{source}: architecture {architecture!r} is not supported (only 'llama')")
    tensors = _tensors(reader, source, get, progress or silent)
    tied = "lm_head.weight" not in tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # written as private; a cache may be shared
    ids = {f"{k}_token_id": get(f"tokenizer.ggml.{g}_token_id", None) for k, g in _SPECIAL.items() if k != "unk"}
    _write_json(directory / "config.json", _config(get, tied, len(get("tokenizer.ggml.tokens"))) | ids)
    _write_json(directory / "generation_config.json", {"do_sample": False} | ids)
    _write_tokenizer(get, source, directory)


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_REQUIRED = object()


def require_gguf() -> Any:
    """The package that reads GGUF. Raises ImportError naming the extra that brings it."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        message = 'converting a GGUF file needs the package gguf: pip install "jaxoverlap[demo]"'
        raise ImportError(message, name="gguf") from None
    return gguf


def _reader(source: Path) -> Any:
    gguf = require_gguf()
    try:
        return gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError) as e:
        raise CheckpointError(f"{source}: not a readable GGUF file: {e}") from None


def _getter(reader: Any, source: Path) -> Callable[..., Any]:
    def get(key: str, default: Any = _REQUIRED) -> Any:
        field = reader.fields.get(key)
        if field is None:
            if default is _REQUIRED:
                raise CheckpointError(f"{source}: {key} is missing")
            return default
        return field.contents()

    return get


def _tensors(reader: Any, source: Path, get: Callable[..., Any], report: Report) -> dict[str, np.ndarray]:
    dequantize = require_gguf().quants.dequantize
    heads = {"attn_q": get("llama.attention.head_count")}
    heads["attn_k"] = get("llama.attention.head_count_kv", heads["attn_q"])
    tensors: dict[str, np.ndarray] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        layer, kind, name = _name(tensor.name, source)
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF lists the fastest axis first
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if layer is not None and kind in heads:
            weight = _halves(weight, heads[kind])
        tensors[name] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
        report("converting", done, len(reader.tensors))
    return tensors


def _name(name: str, source: Path) -> tuple[str | None, str, str]:
    """(layer, kind, checkpoint name) of a GGUF tensor."""
    if name in OUTER:
        return None, name, OUTER[name]
    block, layer, kind, suffix = (*name.split("."), "", "", "")[:4]
    if block != "blk" or suffix != "weight" or kind not in LAYER:
        raise CheckpointError(f"{source}: tensor {name} is unknown")
    return layer, kind, f"model.layers.{layer}.{LAYER[kind]}.weight"


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k from GGUF's order, where rotated pairs are neighbours, to first halves then second halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(get: Callable[..., Any], tied: bool, vocab_size: int) -> dict[str, Any]:
    if get("llama.rope.scaling.type", "none") != "none":
        raise CheckpointError(f"llama.rope.scaling.type {get('llama.rope.scaling.type')!r} is not supported")
    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": get("llama.vocab_size", vocab_size),
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "head_dim": get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": float(np.float32(get("llama.attention.layer_norm_rms_epsilon")).astype(str)),
        "rope_theta": float(get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def _write_tokenizer(get: Callable[..., Any], source: Path, directory: Path) -> None:
    if (kind := get("tokenizer.ggml.model")) != "gpt2":
        raise CheckpointError(f"{source}: tokenizer.ggml.model {kind!r} is not supported (only 'gpt2')")
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in get("tokenizer.ggml.merges"))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(get("tokenizer.ggml.pre", "default"), source)
    backend.decoder = decoders.ByteLevel()
    control = [token for token, type in zip(tokens, types, strict=True) if type == CONTROL_TOKEN]
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in control])
    backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_max_length"] = get("llama.context_length")
    for name, key in _SPECIAL.items():
        if (i := get(f"tokenizer.ggml.{key}_token_id", None)) is not None:
            config[f"{name}_token"] = tokens[i]
    _write_json(directory / "tokenizer_config.json", config)
    if (template := get("tokenizer.chat_template", None)) is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _pre_tokenizer(name: str, source: Path) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("gpt-2", "default"):
        return byte_level
    raise CheckpointError(f"{source}: tokenizer.ggml.pre {name!r} is not supported (only smollm, gpt-2, default)")


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}, indent=2), encoding="utf-8")
