"""Gumbel noise from (seed, position, id) alone, in plain integer arithmetic that runs inside kernels and outside.

The same numbers as `jax.random.gumbel(fold_in(key(seed), position), (V,))` with JAX's default settings, but whatever a
process sets those to. Threefry-2x32 is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Key = tuple[jax.Array, jax.Array]  # two uint32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ROUNDS = 5  # of four rotations


CEILING = 1.0e38  # of a logit over the temperature: above it differences would be inf - inf


def threefry(key: Key, high: jax.Array, low: jax.Array) -> Key:
    """The block cipher on two uint32 words of one shape."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    a, b = high + keys[0], low + keys[1]
    for i in range(_ROUNDS):
        for turn in _ROTATIONS[i % 2]:
            a = a + b
            b = (b << jnp.uint32(turn)) | lax.shift_right_logical(b, jnp.full_like(b, 32 - turn))
            b = a ^ b
        a = a + keys[(i + 1) % 3]
        b = b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return a, b


def step_key(seed: jax.Array, position: jax.Array) -> Key:
    """Of a request's seed, uint32, and the position of the token to come, int32 of the same shape."""
    zero = jnp.zeros_like(seed)
    return threefry((zero, seed), zero, position.astype(jnp.uint32))


def gumbel(key: Key, ids: jax.Array) -> jax.Array:
    """float32 of the shape that key and `ids` int32 broadcast to."""
    low = ids.astype(jnp.uint32) + jnp.zeros_like(key[0])
    a, b = threefry(key, jnp.zeros_like(low), low)
    bits = lax.shift_right_logical(a ^ b, jnp.full_like(a, 9)) | jnp.uint32(0x3F800000)
    tiny = jnp.finfo(jnp.float32).tiny
    uniform = jnp.maximum(lax.bitcast_convert_type(bits, jnp.float32) - 1.0, tiny)
    return -jnp.log(-jnp.log(uniform))
