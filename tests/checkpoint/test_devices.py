"""Restored straight onto several devices: each holds its share, and nothing else is read for it."""

import os
import subprocess
import sys

import pytest
from helpers_models import make_hf_dir

from jaxoverlap.checkpoint.convert import convert
from jaxoverlap.models import registry

LOAD = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxoverlap.checkpoint import orbax
from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.hf import Checkpoint
from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

source, directory, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
mesh = jax.make_mesh((count,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

def rows(name, shape):
    return NamedSharding(mesh, P("model") if len(shape) > 1 else P())

def columns(name, shape):
    return NamedSharding(mesh, P(None, "model") if len(shape) > 1 else P())

config = EngineConfig(model_path=str(directory), dtype="float32")
tree = registry.parameter_tree(source)
with Checkpoint(source) as first:
    whole = {name: first.read(tree, name) for name in tree.shapes}
plain, read = orbax.Checkpoint.array, []

def noted(self, name, dtype, index=()):
    out = plain(self, name, dtype, index)
    read.append((name, out.shape))
    return out

orbax.Checkpoint.array = noted
for place in (rows, columns):
    read.clear()
    try:
        module = registry.load_directory(directory, config, sharding=place).module
    except CheckpointError as e:
        print(e)
        continue
    found = named_leaves(module)
    assert found.keys() == whole.keys()
    for name, array in found.items():
        assert array.sharding == place(name, array.shape), name
        assert len(array.addressable_shards) == count
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[name][shard.index], err_msg=name)
    for name, shape in read:
        assert shape == place(name, whole[name].shape).shard_shape(whole[name].shape), (name, shape)
    assert bool(read) == orbax.is_orbax(directory)
    print("placed", place.__name__)
"""


def load_on(count, source, directory):
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
    }
    command = [sys.executable, "-c", LOAD, str(source), str(directory), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("form", ["orbax", "hf"])
@pytest.mark.parametrize("count", [2, 3])
def test_each_device_holds_its_share(tmp_path, count, form):
    """Sizes that 2 and 3 divide; of a bfloat16 checkpoint in float32."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "vocab_size": 288, "num_attention_heads": 6}
    source = make_hf_dir(tmp_path / "hf", dtype="bfloat16", num_key_value_heads=3, **sizes)
    convert(source, tmp_path / "orbax", registry.parameter_tree(source))
    assert load_on(count, source, tmp_path / form) == ["placed rows", "placed columns"]


@pytest.mark.parametrize("form", ["orbax", "hf"])
def test_experts_are_divided_too(tmp_path, form):
    """Whole experts by `rows`, rows of each by `columns`."""
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
    source = make_hf_dir(tmp_path / "hf", moe_intermediate_size=24, **moe)
    convert(source, tmp_path / "orbax", registry.parameter_tree(source))
    assert load_on(2, source, tmp_path / form) == ["placed rows", "placed columns"]


def test_a_shape_that_does_not_divide_is_named(tmp_path):
    source = make_hf_dir(tmp_path / "hf", vocab_size=272, intermediate_size=48)
    convert(source, tmp_path / "orbax", registry.parameter_tree(source))
    first, second = load_on(3, source, tmp_path / "orbax")
    assert first.startswith("parameter embedding of shape [272, 32] cannot be placed: ")
    assert second.startswith("parameter embedding of shape [272, 32] cannot be placed: ")


@pytest.mark.demo
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.slow)])
def test_the_demo_model_on_several_devices(tmp_path, demo_model, count):
    convert(demo_model, tmp_path / "orbax", registry.parameter_tree(demo_model))
    assert load_on(count, demo_model, tmp_path / "orbax") == ["placed rows", "placed columns"]
