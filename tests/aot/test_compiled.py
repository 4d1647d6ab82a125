"""The engine's programs compiled for GPUs that are not here: in place, one CUDA graph, no spills. `pytest -m aot`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxoverlap.aot.compile import PluginError, compile_devices, measure, plan, report
from jaxoverlap.aot.targets import TARGETS
from jaxoverlap.kernels.paged_attention import decode_attention, extend_attention
from jaxoverlap.models.shapes import published

pytestmark = pytest.mark.aot
MB = 1_000_000


def device(name):
    try:
        return compile_devices(TARGETS[name])[0]
    except PluginError as e:
        pytest.skip(str(e))


def small(name):
    return dataclasses.replace(published(name), num_layers=1)


def check(told, graphs=1):
    assert (told["command_buffers"], told["outside"]) == (graphs, 0)
    assert told["state_copies"] == 0
    assert told["alias_bytes"] == told["state_bytes"] > 0
    assert told["spills"] in (0, None)
    if jax.__version_info__ < (0, 11):
        assert told["spills"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "extend", "forward_decode", "forward_extend", "sample"])
def test_qwen3_on_h200(name):
    """All 28 layers at batch 64."""
    h200 = device("h200")
    told = measure(plan(published("qwen3-0.6b"), TARGETS["h200"], batch=64), name, h200)
    check(told)
    assert told["temp_bytes"] <= 96 * MB
    if name == "decode":
        calls = {"kv_write": 28, "decode_attention": 28, "sample": 1, "future_map_scatter": 2, "future_map_gather": 1}
        assert calls.items() <= told["custom_calls"].items()


def test_a_decode_step_on_h200():
    """One layer, for the default run."""
    check(measure(plan(small("qwen3-0.6b"), TARGETS["h200"], batch=64), "decode", device("h200")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "extend", "forward_decode", "forward_extend"])
def test_experts_on_h200(name):
    """Two layers: the experts' weights, 1.2 GB a layer, are read where they lie."""
    model = dataclasses.replace(published("qwen3-30b-a3b"), num_layers=2)
    told = measure(plan(model, TARGETS["h200"], batch=64), name, device("h200"))
    check(told)
    assert told["temp_bytes"] <= 96 * MB
    assert told["custom_calls"]["grouped_matmul"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "a100", "l4"])
@pytest.mark.parametrize("name", ["decode", "extend", "sample"])
def test_other_targets_and_heads(target, name):
    """SmolLM2: three KV heads of 64; a batch that is no power of two."""
    check(measure(plan(small("smollm2-135m"), TARGETS[target], batch=12), name, device(target)))


def test_a_step_that_is_not_donated_is_caught():
    """The negative control: the same program without donation copies its state."""
    h200 = device("h200")
    work = plan(small("qwen3-0.6b"), TARGETS["h200"], batch=4)
    program = work.programs["decode"]
    args = program.shapes(work.weights, work.state)
    told = report(jax.jit(program.step), args, program.donate, h200)
    assert told["alias_bytes"] == 0
    assert told["state_copies"] >= 2  # keys and values


@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.slow
def test_attention_compiles(target, dtype, dim):
    there = device(target)
    cache = jax.ShapeDtypeStruct((4096, 2, dim), dtype)
    ints = {n: jax.ShapeDtypeStruct((n,), jnp.int32) for n in (1, 4)}
    table = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    where = {"page_size": 16, "first_loc": 0, "scale": 1.0, "implementation": "pallas"}

    def both(q, keys, values, table, lens):
        a = decode_attention(q[:4], keys, values, table, lens, **where)
        return a, extend_attention(q, keys, values, table, lens, lens, lens, **where)

    q = jax.ShapeDtypeStruct((200, 8, dim), dtype)
    told = report(jax.jit(both), (q, cache, cache, table, ints[4]), 1, there)
    assert {"decode_attention": 1, "extend_attention": 1}.items() <= told["custom_calls"].items()


@pytest.mark.parametrize("name", ["decode", "extend"])
def test_dp_attention_on_four_gpus(name):
    """Hidden states, token ids and logits travel between the ranks, once a layer and way; keys and values never do."""
    layers, batch, tokens = 2, 64, 64 if name == "decode" else 512
    model = dataclasses.replace(published("qwen3-0.6b"), num_layers=layers)
    try:
        devices = compile_devices(TARGETS["h200"], 4)
    except PluginError as e:
        pytest.skip(str(e))
    told = measure(plan(model, TARGETS["h200"], batch=batch, devices=devices), name, devices[0])
    assert told["state_copies"] == 0
    assert told["alias_bytes"] == told["state_bytes"] > 0
    hidden, rows, share = f"bf16[{tokens},1024]", f"bf16[{batch},1024]", published("qwen3-0.6b").vocab_size // 4
    gathered = {f"s32[{tokens}]": 1, hidden: layers}
    gathered[rows] = gathered.get(rows, 0) + 1
    assert told["collectives"] == {
        "all-gather": gathered,
        "reduce-scatter": {f"bf16[{4 * tokens},1024]": layers + 1},
        "all-to-all": {f"f32[{4 * batch},{share}]": 1},
    }
