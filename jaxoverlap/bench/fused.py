"""A hand-written decode step to measure against: no scheduler, no pages, no sampling but argmax.

One jitted program a step, over a decoder's weights and a static cache; the token of one step is the input of the next
on the device. The host only launches.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxoverlap.models.decoder import Decoder
from jaxoverlap.models.layers import DecoderConfig, matmul, rotate

Caches = tuple[jax.Array, jax.Array]
Weights = dict[str, Any]


def weights_of(model: Decoder) -> Weights:
    """The model's own arrays; nothing is copied. Raises ValueError for a mixture of experts."""
    if model.config.moe is not None:
        raise ValueError(
            f"the hand-written step computes no mixture of experts (num_experts {model.config.moe.num_experts})"
        )

    def bias(linear: Any) -> jax.Array | None:
        return None if linear.bias is None else linear.bias[...]

    def norm(norm: Any) -> jax.Array | None:
        return None if norm is None else norm.weight[...]

    layers = [
        {
            "attention_norm": layer.attention_norm.weight[...],
            "qkv": layer.attention.qkv.weight[...],
            "qkv_bias": bias(layer.attention.qkv),
            "output": layer.attention.output.weight[...],
            "output_bias": bias(layer.attention.output),
            "q_norm": norm(layer.attention.q_norm),
            "k_norm": norm(layer.attention.k_norm),
            "mlp_norm": layer.mlp_norm.weight[...],
            "gate_up": layer.mlp.gate_up.weight[...],
            "gate_up_bias": bias(layer.mlp.gate_up),
            "down": layer.mlp.down.weight[...],
            "down_bias": bias(layer.mlp.down),
        }
        for layer in model.layers
    ]
    head = model.embedding if model.head is None else model.head
    return {
        "embedding": model.embedding[...],
        "layers": layers,
        "norm": model.norm.weight[...],
        "head": head[...],
    }


def _project(x: jax.Array, w: Weights, name: str) -> jax.Array:
    y = matmul(x, w[name])
    return y if w[f"{name}_bias"] is None else y + w[f"{name}_bias"]


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype) * weight


def decode_step(
    config: DecoderConfig, weights: Weights, caches: Caches, tokens: jax.Array, position: jax.Array
) -> tuple[Caches, jax.Array, jax.Array]:
    """`tokens` int32 [B], all at the same `position` (int32 []). Returns caches, next tokens int32 [B], position + 1.
    The caches are [layers, B, length, KV heads, head size] each."""
    c, batch, length = config, tokens.shape[0], caches[0].shape[2]
    groups = c.num_heads // c.num_kv_heads
    angles = c.rope.angles(jnp.broadcast_to(position, (batch,)))
    seen = jnp.arange(length) <= position
    precision = lax.Precision.HIGHEST if jnp.dtype(c.dtype) == jnp.float32 else None
    keys, values = caches
    x = weights["embedding"][tokens]
    for i, w in enumerate(weights["layers"]):
        y = _project(_norm(x, w["attention_norm"], c.rms_norm_eps), w, "qkv")
        q, k, v = jnp.split(y, [c.num_heads * c.head_dim, (c.num_heads + c.num_kv_heads) * c.head_dim], axis=-1)
        q, k = q.reshape(batch, c.num_heads, c.head_dim), k.reshape(batch, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = _norm(q, w["q_norm"], c.rms_norm_eps), _norm(k, w["k_norm"], c.rms_norm_eps)
        q, k = rotate(q, *angles), rotate(k, *angles)
        at = (i, 0, position, 0, 0)
        keys = lax.dynamic_update_slice(keys, k[None, :, None], at)
        values = lax.dynamic_update_slice(values, v.reshape(1, batch, 1, c.num_kv_heads, c.head_dim), at)
        q = q.reshape(batch, c.num_kv_heads, groups, c.head_dim)
        scores = jnp.einsum("bhgd,blhd->bhgl", q, keys[i], precision=precision, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where(seen, scores * c.head_dim**-0.5, -jnp.inf), axis=-1).astype(x.dtype)
        y = jnp.einsum("bhgl,blhd->bhgd", shares, values[i], precision=precision)
        x = x + _project(y.reshape(batch, -1), w, "output")
        gate, up = jnp.split(_project(_norm(x, w["mlp_norm"], c.rms_norm_eps), w, "gate_up"), 2, axis=-1)
        x = x + _project(jax.nn.silu(gate) * up, w, "down")
    logits = matmul(_norm(x, weights["norm"], c.rms_norm_eps), weights["head"], jnp.float32)
    return (keys, values), jnp.argmax(logits, axis=-1).astype(jnp.int32), position + 1


class FusedDecode:
    """`batch` rows with room for `length` tokens."""

    def __init__(self, model: Decoder, batch: int, length: int) -> None:
        c = model.config
        self._weights = weights_of(model)
        self._shape = (c.num_layers, batch, length, c.num_kv_heads, c.head_dim)
        self._dtype = c.dtype

        def step(*args: Any) -> Any:
            return decode_step(c, *args)

        self._step = jax.jit(step, donate_argnums=1)

    def empty_caches(self) -> Caches:
        return jnp.zeros(self._shape, self._dtype), jnp.zeros(self._shape, self._dtype)

    def step(self, caches: Caches, tokens: jax.Array, position: jax.Array) -> tuple[Caches, jax.Array, jax.Array]:
        """As `decode_step`; the caches are donated."""
        out: tuple[Caches, jax.Array, jax.Array] = self._step(self._weights, caches, tokens, position)
        return out

    def time(self, tokens: jax.Array, start: int, steps: int) -> list[float]:
        """Seconds from each step's tokens to the next's. `tokens` int32 [B] are the input at position `start`, over a
        cache of zeros. Each step is launched before the tokens of the one before are waited for."""
        caches, position = self.empty_caches(), jnp.int32(start)
        done: list[float] = []
        for i in range(steps):
            before = tokens
            caches, tokens, position = self.step(caches, tokens, position)
            if i:
                jax.block_until_ready(before)
                done.append(time.perf_counter())
        jax.block_until_ready(tokens)
        done.append(time.perf_counter())
        return [b - a for a, b in pairwise(done)]
