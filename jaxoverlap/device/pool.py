"""How many tokens of KV fit, where the configuration leaves it open."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import jax

from jaxoverlap.config import EngineConfig

CPU_POOL_BYTES = 1 << 30
CPU_POOL_SHARE = 8  # of the machine's memory: one eighth

CacheShapes = Callable[[int], Sequence[jax.ShapeDtypeStruct]]


def cache_bytes(cache_shapes: CacheShapes, num_locs: int) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in cache_shapes(num_locs))


def check_pool_settings(config: EngineConfig, platform: str) -> None:
    """Raises ValueError where `mem_fraction_static` is set and would size nothing."""
    default = type(config).__dataclass_fields__["mem_fraction_static"].default
    if config.mem_fraction_static == default:
        return
    if platform == "cpu":
        raise ValueError("mem_fraction_static is a share of a GPU's memory: on cpu set max_total_tokens")
    if config.max_total_tokens is not None:
        raise ValueError("mem_fraction_static and max_total_tokens both size the KV pool: set one")


def default_max_total_tokens(
    cache_shapes: CacheShapes,
    config: EngineConfig,
    context_length: int,
    device: jax.Device | None = None,
    ranks: int = 1,
) -> int:
    """The KV pool in tokens, a multiple of the page size, for `config.max_total_tokens` None.

    Never more than all request slots can fill (max_running_requests * context_length). On CPU at most 1 GiB and an
    eighth of the machine's memory. On a GPU what `mem_fraction_static` of the memory leaves once the weights (load them
    first) and all else in use are taken off. `ranks` of one process share a CPU's memory. Raises ValueError if that is
    not one page.
    """
    device = device or jax.devices()[0]
    page = config.page_size
    per_token = cache_bytes(cache_shapes, 1)
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats:
        room = int(stats["bytes_limit"] * config.mem_fraction_static) - stats["bytes_in_use"]
    else:
        room = min(CPU_POOL_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // CPU_POOL_SHARE) // ranks
    fits = max(0, room // per_token // page - 1)  # one page is never given out
    pages = min(fits, -(-config.max_running_requests * context_length // page))
    if pages < 1:
        raise ValueError(
            f"no room for KV: {room} bytes are left of the device's memory and a page of {page} tokens takes "
            f"{per_token * page}; raise mem_fraction_static or set max_total_tokens"
        )
    return pages * page
