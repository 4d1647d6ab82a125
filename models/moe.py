"""A mixture of experts in the place of the gated MLP: a router chooses a few experts for each token.

Shapes: T tokens, H hidden size, E experts, k experts a token, I intermediate size of an expert. Sizes are those of the
arrays, so that each of several devices may hold a slice of I: the sum of their outputs is the whole block's.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxoverlap.checkpoint.parts import Parts, fused, stacked
from jaxoverlap.kernels.backend import Implementation
from jaxoverlap.kernels.grouped_matmul import grouped_matmul
from jaxoverlap.models.layers import MoeConfig, matmul
from jaxoverlap.models.sharding import Split


class SparseMLP(nnx.Module):
    """Parameters start at zero. `router` [E, H]; `gate_up` [E, 2 * I, H], an expert's gate rows before its up rows;
    `down` [E, H, I]. `implementation`: of the experts' products."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: str, implementation: Implementation) -> None:
        self.config, self.implementation = config, implementation
        experts, size = config.num_experts, config.intermediate_size
        self.router = nnx.Param(jnp.zeros((experts, hidden_size), dtype))
        self.gate_up = nnx.Param(jnp.zeros((experts, 2 * size, hidden_size), dtype))
        self.down = nnx.Param(jnp.zeros((experts, hidden_size, size), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, H] -> [T, H]. A token's output depends on no other token."""
        tokens, hidden = x.shape
        k = self.config.num_experts_per_tok
        weights, chosen = self.route(x)
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)  # tokens of one expert become neighbours
        counts = jnp.sum(experts[:, None] == jnp.arange(self.router.shape[0]), axis=0, dtype=jnp.int32)
        product = functools.partial(grouped_matmul, counts=counts, implementation=self.implementation)
        gate, up = jnp.split(product(x[order // k], self.gate_up[...]), 2, axis=-1)
        y = product(jax.nn.silu(gate) * up, self.down[...])
        y = y[jnp.argsort(order)].reshape(tokens, k, hidden)  # taken back, as scattered sums are slow and unordered
        return jnp.sum(y * weights[:, :, None], axis=1).astype(x.dtype)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[T, H] -> weights float32 [T, k] of the chosen experts int32 [T, k], the likeliest first."""
        scores = jax.nn.softmax(matmul(x, self.router[...]).astype(jnp.float32), axis=-1)
        weights, chosen = lax.top_k(scores, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen

    def splits(self) -> dict[str, Split]:
        """See Decoder.splits: a share of the intermediate features of every expert."""
        return {"gate_up": Split(axis=1, groups=2), "down": Split(axis=2)}

    def parts(self, name: str) -> Parts:
        hidden, size = self.down.shape[1:]
        experts = [f"{name}.experts.{i}" for i in range(self.down.shape[0])]
        gate_up = [fused([f"{e}.gate_proj.weight", f"{e}.up_proj.weight"], [size, size]) for e in experts]
        return {
            "router": fused([f"{name}.gate.weight"], [len(experts)]),
            "gate_up": stacked(gate_up),
            "down": stacked([fused([f"{e}.down_proj.weight"], [hidden]) for e in experts]),
        }
