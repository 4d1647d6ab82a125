"""Makes the helpers beside this file importable, and gives the demo model to tests that ask for it."""

from pathlib import Path

import pytest
from helpers_models import demo_model_dir

from jaxoverlap.device.compile_cache import enable_compilation_cache
from jaxoverlap.paths import cache_dir


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> None:
    """Programs compiled by one test, or by an earlier run, serve the others."""
    enable_compilation_cache(cache_dir() / "compiled")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the demo model."""
    return demo_model_dir()
