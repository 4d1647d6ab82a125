"""Makes the helpers beside this file importable, and gives the demo model to tests that ask for it."""

import os
from pathlib import Path

# JAX's CUDA plugin can compile where there is no CUDA driver, if it is told so before JAX first looks for devices.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import pytest
from helpers_models import demo_model_dir

from jaxoverlap.device.compile_cache import enable_compilation_cache
from jaxoverlap.kernels.backend import TRITON_DEPRECATED
from jaxoverlap.paths import cache_dir

LITTLE_OPTIMIZED = "jax_disable_most_optimizations"


def pytest_configure() -> None:
    jax.config.update("jax_num_cpu_devices", 4)  # for the ranks of tests/parallel, before JAX starts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(not on_gpu, reason="needs a CUDA device"))
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{TRITON_DEPRECATED}"))


@pytest.fixture(scope="session", autouse=True)
def compilation() -> None:
    """Programs compiled by one test, or by an earlier run, serve the others. On a CPU most of the suite's time is spent
    compiling, so LLVM optimizes little there, unless JAX's own variable says otherwise."""
    enable_compilation_cache(cache_dir() / "compiled")
    if jax.default_backend() == "cpu" and LITTLE_OPTIMIZED.upper() not in os.environ:
        jax.config.update(LITTLE_OPTIMIZED, True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the demo model."""
    return demo_model_dir()
