"""Makes the helpers beside this file importable, and gives the demo model to tests that ask for it."""

from pathlib import Path

import pytest
from helpers_models import demo_model_dir


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of the demo model."""
    return demo_model_dir()
