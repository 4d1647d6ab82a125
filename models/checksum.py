"""The checksum model: integers only, exact on every platform, and its next token depends on every token in the cache.

One wrong page, position, order or relayed token changes all that follows, which makes it the scheduler's test model:
`ChecksumConfig.oracle` gives the only right answer, whatever the schedule was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxoverlap.models.paged import PagedContext

_START = 7
_FACTOR = 31
_PERIOD = 13
_UNROLL = 8  # tokens hashed in one turn of the loop
_GAP = 1000.0  # between neighbouring logits: sampling at any usual temperature takes the top one


@dataclass(frozen=True)
class ChecksumConfig:
    """Context c[0..n-1]: h = 7; for i, t in enumerate(c): h = (h*31 + (t+1)*(i%13+1)) % modulus; the next token is
    offset + h % span. Raises ValueError where that leaves the vocabulary or int32."""

    vocab_size: int = 1000
    modulus: int = 1_000_003
    span: int = 900
    offset: int = 10
    eos_token_ids: tuple[int, ...] = (2,)
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= self.offset + self.span <= self.vocab_size:
            raise ValueError(f"offset {self.offset} + span {self.span} is past the vocabulary of {self.vocab_size}")
        if self.modulus * _FACTOR + self.vocab_size * _PERIOD >= 1 << 31:
            raise ValueError(f"modulus {self.modulus} with vocab_size {self.vocab_size} overflows int32")

    def next_token(self, context: Sequence[int]) -> int:
        h = _START
        for i, t in enumerate(context):
            h = (h * _FACTOR + (int(t) + 1) * (i % _PERIOD + 1)) % self.modulus
        return self.offset + h % self.span

    def oracle(
        self,
        prompt: Sequence[int],
        n: int,
        eos: int | None = None,
        allow: Callable[[list[int]], Collection[int]] | None = None,
    ) -> list[int]:
        """What any correct engine answers to `prompt`: n tokens, fewer when `eos` comes up (it is included). `allow`
        maps the tokens so far to the ids that a grammar allows; the nearest one upwards (cyclic) is taken."""
        out: list[int] = []
        while len(out) < n and (not out or out[-1] != eos):
            token = self.next_token([*prompt, *out])
            if allow is not None:
                token = min(allow(out), key=lambda a: (a - token) % self.vocab_size)
            out.append(token)
        return out


class ChecksumModel(nnx.Module):
    """`ChecksumConfig`'s rule as a model with a paged cache of token ids; it has no weights."""

    def __init__(self, config: ChecksumConfig | None = None) -> None:
        self.config = config or ChecksumConfig()

    def cache_shapes(self, num_locs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((num_locs,), jnp.int32),)

    def __call__(
        self, ids: jax.Array, context: PagedContext, cache: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """ids int32 [T] -> int32 [T, 1], the hash h of each token's row, and the cache."""
        stored = cache[0].at[context.token_locs].set(ids)
        lens = context.seq_lens

        def body(i: jax.Array, h: jax.Array) -> jax.Array:
            positions = i * _UNROLL + jnp.arange(_UNROLL, dtype=jnp.int32)
            weights = lax.rem(positions, jnp.int32(_PERIOD)) + 1
            tokens = stored[context.locations(jnp.broadcast_to(positions, (lens.shape[0], _UNROLL)))]  # [B, unroll]
            for j in range(_UNROLL):
                grown = lax.rem(h * _FACTOR + (tokens[:, j] + 1) * weights[j], jnp.int32(self.config.modulus))
                h = jnp.where(positions[j] < lens, grown, h)
            return h

        steps = (jnp.max(lens) + _UNROLL - 1) // _UNROLL
        h = lax.fori_loop(0, steps, body, jnp.full_like(lens, _START))
        return h[context.token_rows][:, None], (stored,)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden int32 [B, 1] -> float32 [B, V]: 0 at the next token, falling by 1000 with each id upwards (cyclic)."""
        following = self.config.offset + lax.rem(hidden, jnp.int32(self.config.span))
        distance = jnp.arange(self.config.vocab_size) - following
        distance = jnp.where(distance < 0, distance + self.config.vocab_size, distance)
        return distance.astype(jnp.float32) * -_GAP
