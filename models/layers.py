"""The blocks of decoder-only models: rotary embedding, norms, attention over a paged cache, gated MLP.

Shapes: T tokens of the whole batch, flat; H query heads, K KV heads, D head size. Weights are [out, in], as in a
checkpoint; q, k and v are one weight, gate and up another. `context` is models/paged.py's PagedContext.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxoverlap.checkpoint.parts import Parts, fused, nested
from jaxoverlap.models.sharding import ALONE, Ranks, Split

Cache = tuple[jax.Array, jax.Array]  # k and v, each [layers * num_locs, K, D]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over a whole head. `factor` 1 and no `original_length`: unscaled.

    With `factor` alone every frequency is divided by it ("linear"). With `original_length` (tokens) it is Llama 3's
    rule ("llama3"): wavelengths below original_length / high_freq_factor stay, those above original_length /
    low_freq_factor are divided by `factor`, those between are blended linearly in original_length / wavelength.
    """

    head_dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequencies(self) -> np.ndarray:
        """float32 [D / 2], radians a position."""
        base = self.theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        if self.original_length is None:
            return (base / self.factor).astype(np.float32)
        turns = self.original_length * base / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (kept * base + (1 - kept) * base / self.factor).astype(np.float32)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """int32 [T] -> cos, sin, each float32 [T, 1, D / 2]."""
        angle = positions[:, None, None].astype(jnp.float32) * self.frequencies()
        return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [T, heads, D] turned by the angles; dimension i pairs with i + D / 2. Computed in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixture of experts that all layers but `dense_layers` have in the place of the MLP; see models/moe.py."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool = False  # the chosen experts' weights are made to sum to 1
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a family's config.json comes to. `dtype` is that of parameters, activations and KV cache."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head's query and key is normed before its rotation
    sliding_window: int | None = None  # tokens; not enforced here, see registry.load
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"


def matmul(x: jax.Array, weight: jax.Array, out_dtype: Any = None) -> jax.Array:
    """x [T, in], weight [out, in] -> [T, out]. float32 is computed as float32 on every platform (no TF32)."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x.dtype,
    )


class Linear(nnx.Module):
    """One or more projections of the same input, held as one weight [sum(outs), in]."""

    def __init__(self, size: int, outs: Sequence[int], bias: bool, dtype: str) -> None:
        self.outs = tuple(outs)
        self.weight = nnx.Param(jnp.zeros((sum(outs), size), dtype))
        self.bias = nnx.Param(jnp.zeros((sum(outs),), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """[T, in] -> one [T, out] a projection."""
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...]
        ends = np.cumsum(self.outs)[:-1] * y.shape[-1] // sum(self.outs)  # a rank's share is as much narrower
        return jnp.split(y, ends.tolist(), axis=-1)

    def parts(self, names: Sequence[str]) -> Parts:
        parts = {"weight": fused([f"{n}.weight" for n in names], self.outs)}
        if self.bias is not None:
            parts["bias"] = fused([f"{n}.bias" for n in names], self.outs)
        return parts


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, dtype: str) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x / rms(x) over the last axis in float32, rounded to x's dtype, times the weight."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.weight[...]

    def parts(self, name: str) -> Parts:
        return {"weight": fused([f"{name}.weight"], [self.weight.shape[0]])}


class Attention(nnx.Module):
    """Over inputs of the hidden size, or of `size`."""

    def __init__(self, config: DecoderConfig, size: int | None = None) -> None:
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        outs = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        self.qkv = Linear(size or c.hidden_size, outs, c.qkv_bias, c.dtype)
        self.output = Linear(c.num_heads * c.head_dim, [c.hidden_size], c.output_bias, c.dtype)
        self.q_norm, self.k_norm = (
            RMSNorm(c.head_dim, c.rms_norm_eps, c.dtype) if c.qk_norm else None for _ in range(2)
        )

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], context: Any, cache: Cache, layer: int
    ) -> tuple[jax.Array, Cache]:
        tokens = x.shape[0]
        q, k, v = self.qkv(x)
        q = q.reshape(tokens, self.heads, self.head_dim)
        k = k.reshape(tokens, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *angles), rotate(k, *angles)
        cache = context.write(cache, layer, k, v.reshape(tokens, self.kv_heads, self.head_dim))
        y = context.attend(q, cache, layer, self.head_dim**-0.5)
        return self.output(y.reshape(tokens, self.heads * self.head_dim))[0], cache

    def parts(self, name: str) -> Parts:
        parts = {
            **nested("qkv", self.qkv.parts([f"{name}.{p}_proj" for p in "qkv"])),
            **nested("output", self.output.parts([f"{name}.o_proj"])),
        }
        for which, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                parts |= nested(which, norm.parts(f"{name}.{which}"))
        return parts


class GatedMLP(nnx.Module):
    def __init__(self, config: DecoderConfig) -> None:
        c = config
        self.gate_up = Linear(c.hidden_size, [c.intermediate_size] * 2, c.mlp_bias, c.dtype)
        self.down = Linear(c.intermediate_size, [c.hidden_size], c.mlp_bias, c.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_up(x)
        return self.down(jax.nn.silu(gate) * up)[0]

    def parts(self, name: str) -> Parts:
        return nested("gate_up", self.gate_up.parts([f"{name}.gate_proj", f"{name}.up_proj"])) | nested(
            "down", self.down.parts([f"{name}.down_proj"])
        )

    def splits(self) -> dict[str, Split]:
        """See Decoder.splits: a share of the intermediate features."""
        splits = {"gate_up.weight": Split(groups=2), "down.weight": Split(axis=1)}
        if self.gate_up.bias is not None:
            splits |= {"gate_up.bias": Split(groups=2), "down.bias": Split(first_only=True)}
        return splits


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then `mlp` ([T, hidden] -> [T, hidden])."""

    def __init__(self, config: DecoderConfig, mlp: Any, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = mlp

    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], context: Any, cache: Cache, layer: int
    ) -> tuple[jax.Array, Cache]:
        y, cache = self.attention(self.attention_norm(x), angles, context, cache, layer)
        x = x + y
        return x + self.ranks.summed(self.mlp, self.mlp_norm(x)), cache

    def parts(self, name: str) -> Parts:
        return {
            **nested("attention_norm", self.attention_norm.parts(f"{name}.input_layernorm")),
            **nested("attention", self.attention.parts(f"{name}.self_attn")),
            **nested("mlp_norm", self.mlp_norm.parts(f"{name}.post_attention_layernorm")),
            **nested("mlp", self.mlp.parts(f"{name}.mlp")),
        }
