"""Sizes of well-known models as published, and tiny ones: for compiling and timing steps without weights."""

from __future__ import annotations

from typing import Any

from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.models.layers import DecoderConfig
from jaxoverlap.models.llama import llama_config
from jaxoverlap.models.qwen3 import qwen3_config
from jaxoverlap.models.qwen3_moe import qwen3_moe_config

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "tiny-moe": _TINY
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "qwen3-30b-a3b": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "smollm2-135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0}
    | {"tie_word_embeddings": True},
    "llama-3.1-8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"rope_theta": 500000.0, "tie_word_embeddings": False},
}
SHAPES = tuple(_FIELDS)


def published(name: str, dtype: str = "bfloat16") -> DecoderConfig:
    """The configuration of one of SHAPES. Raises ValueError for another name."""
    if name not in _FIELDS:
        raise ValueError(f"{name!r} is none of {', '.join(SHAPES)}")
    fields = Fields(_FIELDS[name], name)
    if "num_experts" in fields:
        return qwen3_moe_config(fields, dtype)
    return qwen3_config(fields, dtype) if name.startswith("qwen3") else llama_config(fields, dtype)
