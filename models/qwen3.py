"""Qwen3 (dense) and Qwen2: the decoder with norms on queries and keys, or with biases on q, k and v."""

from __future__ import annotations

from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.models.decoder import decoder_config
from jaxoverlap.models.layers import DecoderConfig

_LENGTH = 32768
_HEAD_DIM = 128
_KV_HEADS = 32


def qwen3_config(fields: Fields, dtype: str) -> DecoderConfig:
    """config.json of Qwen3. Raises CheckpointError naming the field."""
    bias = fields.boolean("attention_bias", False)
    return decoder_config(
        fields,
        dtype,
        default_kv_heads=_KV_HEADS,
        default_head_dim=_HEAD_DIM,
        default_length=_LENGTH,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=window(fields),
    )


def qwen2_config(fields: Fields, dtype: str) -> DecoderConfig:
    """config.json of Qwen2 and Qwen2.5. Raises CheckpointError naming the field."""
    return decoder_config(
        fields,
        dtype,
        default_kv_heads=_KV_HEADS,
        default_length=_LENGTH,
        qkv_bias=True,
        sliding_window=window(fields),
    )


def window(fields: Fields) -> int | None:
    """Tokens that some layers look back at most; the field counts only where it is switched on."""
    return fields.integer("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else None
