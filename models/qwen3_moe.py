"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of most layers' MLP."""

from __future__ import annotations

from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.models.decoder import decoder_config
from jaxoverlap.models.layers import DecoderConfig, MoeConfig
from jaxoverlap.models.qwen3 import window

_LENGTH = 32768
_KV_HEADS = 4


def qwen3_moe_config(fields: Fields, dtype: str) -> DecoderConfig:
    """config.json of Qwen3-MoE. Raises CheckpointError naming the field. output_router_logits and router_aux_loss_coef
    are for training only."""
    bias = fields.boolean("attention_bias", False)
    return decoder_config(
        fields,
        dtype,
        default_kv_heads=_KV_HEADS,
        default_length=_LENGTH,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=window(fields),
        moe=_moe(fields),
    )


def _moe(fields: Fields) -> MoeConfig:
    experts = _num_experts(fields)
    chosen = fields.integer("num_experts_per_tok", 8)
    if chosen > experts:
        raise fields.error("num_experts_per_tok", f"{chosen} is above num_experts {experts}")
    return MoeConfig(
        num_experts=experts,
        num_experts_per_tok=chosen,
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        dense_layers=_dense_layers(fields),
    )


def _num_experts(fields: Fields) -> int:
    """transformers 5 saves the field under another name."""
    older, newer = "num_experts", "num_local_experts"
    experts = fields.integer(older if older in fields else newer, 128)
    if (other := fields.integer(newer, experts)) != experts:
        raise fields.error(newer, f"{other} differs from {older} {experts}")
    return experts


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Those that mlp_only_layers names, and all but each decoder_sparse_step-th."""
    layers = range(fields.integer("num_hidden_layers"))
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.indices("mlp_only_layers")
    for layer in dense:
        if layer not in layers:
            raise fields.error("mlp_only_layers", f"names layer {layer}, num_hidden_layers is {len(layers)}")
    return tuple(layer for layer in layers if layer in dense or (layer + 1) % step)
