"""The scheduler, and what it stands on, runs where jax is not even importable."""

import subprocess
import sys

import pytest

PROBE = """
import sys
sys.modules["jax"] = None  # importing it fails
import {module}
loaded = [m for m in sys.modules if m.split(".")[0] in ("jaxlib", "flax") and sys.modules[m] is not None]
assert not loaded, loaded
"""


@pytest.mark.parametrize("module", ["jaxoverlap.scheduler", "jaxoverlap.memory.kv_cache", "jaxoverlap.replay.command"])
def test_imports_no_jax(module):
    done = subprocess.run([sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_probe_can_fail():
    done = subprocess.run([sys.executable, "-c", PROBE.format(module="jax")], capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr
