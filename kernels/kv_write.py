"""Write a step's keys or values into the flat paged cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxoverlap.kernels.backend import check_shape


def kv_write(cache: jax.Array, new: jax.Array, locs: jax.Array) -> jax.Array:
    """`cache` with `new` at `locs`, in place where the cache is donated.

    cache [N, H, D], new [T, H, D] (cast to the cache's dtype), locs int32 [T]. Locations of real tokens are distinct;
    padding tokens name a location of page 0, which belongs to nobody. Raises ValueError for other shapes.
    """
    check_shape("cache", cache, (None, None, None))
    check_shape("locs", locs, (None,), jnp.int32)
    check_shape("new", new, (locs.shape[0], *cache.shape[1:]))
    return cache.at[locs].set(new.astype(cache.dtype), mode="drop")
