"""The decoder of models/decoder.py in PyTorch: Llama, Mistral, Qwen2 and Qwen3, on the very weights that JAX loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.compare.torch_paged import Cache, PagedContext
from jaxoverlap.models.layers import DecoderConfig

Angles = tuple[Tensor, Tensor]  # cos and sin, float32 [T, 1, D / 2]


class TorchDecoder:
    """`weights` by the parameters' dotted paths, [out, in] as in a checkpoint. Raises ValueError for a mixture of
    experts."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
        if config.moe is not None:
            raise ValueError(
                f"the PyTorch decoder computes no mixture of experts (num_experts {config.moe.num_experts})"
            )
        self.config = config
        self.weights = weights
        self.frequencies = torch.from_numpy(config.rope.frequencies()).to(weights["embedding"].device)

    @classmethod
    def sharing(cls, module: Any) -> TorchDecoder:
        """On the arrays of a models.decoder.Decoder: the same memory, where they are, so that nothing is there
        twice."""
        return cls(module.config, {name: torch.from_dlpack(leaf) for name, leaf in named_leaves(module).items()})

    def cache(self, num_locs: int, device: torch.device) -> Cache:
        """k and v, each [layers * num_locs, KV heads, head size]."""
        c = self.config
        shape = (c.num_layers * num_locs, c.num_kv_heads, c.head_dim)
        dtype = self.weights["embedding"].dtype
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def __call__(self, ids: Tensor, context: PagedContext, cache: Cache) -> Tensor:
        """int64 ids [T] -> normed hidden states [T, hidden]."""
        x = self.weights["embedding"][ids]
        angle = context.positions[:, None, None].float() * self.frequencies
        angles = angle.cos(), angle.sin()
        for i in range(self.config.num_layers):
            at = f"layers.{i}"
            x = x + self._attention(i, self._norm(f"{at}.attention_norm", x), angles, context, cache)
            x = x + self._mlp(f"{at}.mlp", self._norm(f"{at}.mlp_norm", x))
        return self._norm("norm", x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden] -> float32 [B, vocabulary]; in bfloat16 rounded to that first, as SGLang's are."""
        head = "embedding" if self.config.tie_word_embeddings else "head"
        return linear(hidden, self.weights[head]).float()

    def _attention(self, layer: int, x: Tensor, angles: Angles, context: PagedContext, cache: Cache) -> Tensor:
        c, at = self.config, f"layers.{layer}.attention"
        kv = c.num_kv_heads * c.head_dim
        q, k, v = self._linear(f"{at}.qkv", x).split([c.num_heads * c.head_dim, kv, kv], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, c.head_dim)) for part in (q, k, v))
        if c.qk_norm:
            q, k = self._norm(f"{at}.q_norm", q), self._norm(f"{at}.k_norm", k)
        context.write(cache, layer, _rotate(k, angles), v)
        y = context.attend(_rotate(q, angles), cache, layer, c.head_dim**-0.5)
        return self._linear(f"{at}.output", y.flatten(1))

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        gate, up = self._linear(f"{at}.gate_up", x).chunk(2, dim=-1)
        return self._linear(f"{at}.down", silu(gate) * up)

    def _linear(self, at: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{at}.weight"], self.weights.get(f"{at}.bias"))

    def _norm(self, at: str, x: Tensor) -> Tensor:
        """As models/layers.py's RMSNorm: in float32, rounded, times the weight."""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return y.to(x.dtype) * self.weights[f"{at}.weight"]


def _rotate(x: Tensor, angles: Angles) -> Tensor:
    """x [T, heads, D] turned by the angles; dimension i pairs with i + D / 2. Computed in float32."""
    cos, sin = angles
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
