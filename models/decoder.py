"""The decoder that all families share (rotary positions, grouped queries, gated MLPs or mixtures of experts), and how
config.json states it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.checkpoint.parts import Part, Parts, nested
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.models.layers import Cache, DecoderConfig, DecoderLayer, GatedMLP, RMSNorm, Rope, matmul
from jaxoverlap.models.moe import SparseMLP
from jaxoverlap.models.sharding import ALONE, Ranks, Split

IGNORED_TENSORS = r"(.*\.)?rotary_emb\.inv_freq"  # tables that older checkpoints carry; computed here


class Decoder(nnx.Module):
    """Parameters start at zero: build it under nnx.eval_shape and fill it (checkpoint/load.py). `kernels`: for what is
    not asked of the context; by default plain XLA. With `ranks` that share them, a rank computes with what `splits`
    leaves it of each."""

    def __init__(self, config: DecoderConfig, kernels: Kernels | None = None, ranks: Ranks = ALONE) -> None:
        c = config
        self.config = c
        self.ranks = ranks
        self.embedding = nnx.Param(jnp.zeros((c.vocab_size, c.hidden_size), c.dtype))
        self.layers = nnx.List([DecoderLayer(c, mlp_of(c, i, kernels), ranks) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, c.dtype)
        self.head = None if c.tie_word_embeddings else nnx.Param(jnp.zeros((c.vocab_size, c.hidden_size), c.dtype))

    def cache_shapes(self, num_locs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """k and v, each [layers * num_locs, KV heads, head size]."""
        c = self.config
        shape = jax.ShapeDtypeStruct((c.num_layers * num_locs, c.num_kv_heads, c.head_dim), jnp.dtype(c.dtype))
        return shape, shape

    def __call__(
        self, ids: jax.Array, context: Any, cache: Cache, num_layers: int | None = None
    ) -> tuple[jax.Array, Cache]:
        """int32 ids [T] -> normed hidden states [T, hidden] and the cache with the tokens' keys and values written.
        `num_layers`: as if there were no more than these first ones."""
        hidden, cache, _ = self.capturing(ids, context, cache, (), num_layers)
        return hidden, cache

    def capturing(
        self, ids: jax.Array, context: Any, cache: Cache, captured: Sequence[int], num_layers: int | None = None
    ) -> tuple[jax.Array, Cache, list[jax.Array]]:
        """A call that also gives what enters each of the layers `captured`, in their order: [T, hidden] each."""
        x, entering = self.embed(ids), []
        angles = self.config.rope.angles(context.positions)
        for i, layer in enumerate(itertools.islice(self.layers, num_layers)):
            if i in captured:
                entering.append(x)
            x, cache = layer(x, angles, context, cache, i)
        return self.norm(x), cache, entering

    def embed(self, ids: jax.Array) -> jax.Array:
        """int32 [T] -> [T, hidden]."""
        return self.ranks.rows(self.embedding[...], ids)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B, hidden] -> float32 [B, vocabulary]."""
        head = (self.embedding if self.head is None else self.head)[...]
        return self.ranks.columns(lambda x: matmul(x, head, jnp.float32), hidden, self.config.vocab_size)

    def splits(self) -> dict[str, Split]:
        """How ranks divide the parameters, by name; each has the whole of those that are not named."""
        vocabulary = Split(padded=True)
        splits = {"embedding": vocabulary} | ({} if self.head is None else {"head": vocabulary})
        for i, layer in enumerate(self.layers):
            splits |= {f"layers.{i}.mlp.{name}": split for name, split in layer.mlp.splits().items()}
        return splits

    def parts(self) -> Parts:
        """The checkpoint's tensors by parameter."""
        parts: Parts = {"embedding": (Part("model.embed_tokens.weight"),)}
        for i, layer in enumerate(self.layers):
            parts |= nested(f"layers.{i}", layer.parts(f"model.layers.{i}"))
        parts |= nested("norm", self.norm.parts("model.norm"))
        if self.head is not None:
            parts["head"] = (Part("lm_head.weight"),)
        return parts

    def duplicates(self) -> dict[str, str]:
        """Tensors that a checkpoint may hold beside an equal one: name -> the one that is used."""
        return {} if self.head is not None else {"lm_head.weight": "model.embed_tokens.weight"}


def mlp_of(config: DecoderConfig, layer: int, kernels: Kernels | None) -> GatedMLP | SparseMLP:
    """What a layer has behind its attention."""
    if config.moe is None or layer in config.moe.dense_layers:
        return GatedMLP(config)
    return SparseMLP(config.moe, config.hidden_size, config.dtype, kernels.grouped_matmul if kernels else "xla")


def decoder_config(
    fields: Fields,
    dtype: str,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
    default_length: int = 2048,
    **flags: Any,
) -> DecoderConfig:
    """The fields that all families share. Raises CheckpointError naming one that is missing, wrong or not supported."""
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("rope_interleaved", False)
    fields.refuse_unless("quantization_config", None)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default_kv_heads or heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{kv_heads} must divide num_attention_heads {heads}")
    head_dim = fields.integer("head_dim", default_head_dim)
    if head_dim is None:
        if hidden % heads:
            raise fields.error("hidden_size", f"{hidden} must be a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, not {head_dim}")
    length = fields.integer("max_position_embeddings", default_length)
    rope = rope_from(fields, head_dim)
    if rope.original_length is None:
        length = int(length * rope.factor)  # as SGLang: a linear factor stretches the stated length
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        eos_token_ids=fields.ids("eos_token_id"),
        dtype=dtype,
        **flags,
    )


def rope_from(fields: Fields, head_dim: int) -> Rope:
    """`rope_theta` and `rope_scaling`, or the newer `rope_parameters` that holds both.

    Raises CheckpointError for a rope type other than default, linear and llama3, and for partial rotation.
    """
    group = fields.group("rope_parameters") or fields.group("rope_scaling")
    for where in (fields, group or fields):
        where.refuse_unless("partial_rotary_factor", 1, 1.0)
    theta = fields.number("rope_theta", 10000.0)
    if group is None:
        return Rope(head_dim, theta)
    theta = group.number("rope_theta", theta)
    name = "rope_type" if "rope_type" in group else "type"
    kind = group.text(name, "default")
    if kind == "default":
        return Rope(head_dim, theta)
    group.refuse_unless(name, "default", "linear", "llama3")
    factor = group.number("factor")
    if factor < 1:
        raise group.error("factor", f"must be at least 1, not {factor}")
    if kind == "linear":
        return Rope(head_dim, theta, factor)
    original = group.integer("original_max_position_embeddings")
    low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
    if not 0 < low < high:
        raise group.error("low_freq_factor", f"{low} must be above 0 and below high_freq_factor {high}")
    return Rope(head_dim, theta, factor, original, low, high)
