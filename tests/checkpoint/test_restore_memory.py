"""A restore never holds the model twice: peak memory of a fresh process, on a random checkpoint above 1 GB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxoverlap.checkpoint import orbax
from jaxoverlap.models import registry

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

RESTORE = """
import json, re, sys
from pathlib import Path
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

directory, dtype, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
sharding = None
if count > 1:
    mesh = jax.make_mesh((count,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = lambda name, shape: NamedSharding(mesh, P("model") if len(shape) > 1 else P())
jax.block_until_ready(jax.device_put(0))
config = EngineConfig(model_path=directory, dtype=dtype)
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
model = registry.load_directory(Path(directory), config, sharding=sharding).module
leaves = jax.block_until_ready(named_leaves(model))
peak = kilobytes("VmHWM")
size = sum(leaf.nbytes for leaf in leaves.values())
print(json.dumps({"before": before * 1024, "peak": peak * 1024, "weights": size}))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    (folder / "files").mkdir()
    (folder / "files" / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(leaf.shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
        for name, leaf in registry.parameter_tree(folder / "files").shapes.items()
    }
    assert sum(array.nbytes for array in weights.values()) > 1e9
    orbax.save(folder / "model", weights, files=folder / "files").wait()
    return folder / "model"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux' /proc")
@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        pytest.param("float32", 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.soak),
        pytest.param("bfloat16", 2, marks=pytest.mark.soak),
    ],
)
def test_peak_of_a_restore(directory, dtype, count):
    flags = f"--xla_force_host_platform_device_count={count}"
    done = subprocess.run(
        [sys.executable, "-c", RESTORE, str(directory), dtype, str(count)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] > 1e9
    ratio = (found["peak"] - found["before"]) / found["weights"]
    print(f"{dtype} on {count}: {ratio:.3f} of {found['weights'] / 1e9:.2f} GB")
    assert ratio <= 1.3
