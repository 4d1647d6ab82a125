import types

import jax
import jax.numpy as jnp
import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.device import pool
from jaxoverlap.device.pool import check_pool_settings, default_max_total_tokens


def llama_like(num_locs):
    return (jax.ShapeDtypeStruct((30 * num_locs, 3, 64), jnp.float32),) * 2  # 46,080 bytes a token


def tokens(context=8192, device=None, shapes=llama_like, **config):
    return default_max_total_tokens(shapes, EngineConfig(**config), context, device)


def test_cpu_takes_what_the_slots_can_fill_or_a_gibibyte(monkeypatch):
    monkeypatch.setattr(pool.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 23}.get)  # 32 GiB
    assert tokens(context=100, max_running_requests=4) == 400
    assert tokens(context=101, max_running_requests=4, page_size=8) == 408
    assert tokens() == (1 << 30) // 46_080 - 1
    assert tokens(page_size=16) == ((1 << 30) // 46_080 // 16 - 1) * 16
    monkeypatch.setattr(pool.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 18}.get)  # 1 GiB
    assert tokens() == (1 << 27) // 46_080 - 1


def test_gpu_takes_its_share_of_what_is_left():
    stats = {"bytes_limit": 10_000_000_000, "bytes_in_use": 1_000_000_000}
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert tokens(device=gpu, mem_fraction_static=0.5) == 4_000_000_000 // 46_080 - 1
    assert tokens(context=64, device=gpu) == 16 * 64
    stats["bytes_in_use"] = 9_100_000_000
    with pytest.raises(ValueError, match="raise mem_fraction_static or set max_total_tokens"):
        tokens(device=gpu)


def test_a_memory_fraction_that_would_size_nothing_is_refused():
    check_pool_settings(EngineConfig(max_total_tokens=512), "cpu")
    check_pool_settings(EngineConfig(mem_fraction_static=0.5), "gpu")
    with pytest.raises(ValueError, match="on cpu set max_total_tokens"):
        check_pool_settings(EngineConfig(mem_fraction_static=0.5), "cpu")
    with pytest.raises(ValueError, match="mem_fraction_static and max_total_tokens both"):
        check_pool_settings(EngineConfig(mem_fraction_static=0.5, max_total_tokens=512), "gpu")
