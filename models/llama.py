"""Llama 2 and 3, SmolLM2, Mistral: the decoder as it is."""

from __future__ import annotations

from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.models.decoder import decoder_config
from jaxoverlap.models.layers import DecoderConfig


def llama_config(fields: Fields, dtype: str) -> DecoderConfig:
    """config.json of Llama and SmolLM2. Raises CheckpointError naming the field."""
    bias = fields.boolean("attention_bias", False)
    return decoder_config(fields, dtype, qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


def mistral_config(fields: Fields, dtype: str) -> DecoderConfig:
    """config.json of Mistral, whose defaults for absent fields differ. Raises CheckpointError naming the field."""
    return decoder_config(
        fields,
        dtype,
        default_kv_heads=8,
        default_length=131072,
        sliding_window=fields.integer("sliding_window", None),
    )
