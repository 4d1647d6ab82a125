"""Times of kernels, decode steps and whole loads on the device that JAX has, against what its memory can move."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import ForwardMode, Launch
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.pool import cache_bytes
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.kernels.backend import Kernels, quiet_lowering
from jaxoverlap.kernels.kv_write import kv_write
from jaxoverlap.kernels.paged_attention import decode_attention, extend_attention
from jaxoverlap.kernels.sample import RowParams, sample
from jaxoverlap.models.decoder import Decoder
from jaxoverlap.models.layers import DecoderConfig
from jaxoverlap.models.registry import LoadedModel

PAGE = 16
NO_WRITES = np.zeros((3, 0), np.int32)
PROMPT = 512  # tokens of the prompt that extend attention is timed on, at most
WARM_UP = 3


def random_model(config: DecoderConfig) -> Decoder:
    """With small random weights, made on the device."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, Kernels.choose("auto", jax.default_backend()))))
    leaves, tree = jax.tree.flatten(shapes)
    draw = jax.jit(lambda key, x: jax.random.normal(key, x.shape, x.dtype) * 0.02, static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    filled = [draw(k, jax.ShapeDtypeStruct(x.shape, x.dtype)) for k, x in zip(keys, leaves)]
    return nnx.merge(graph, jax.tree.unflatten(tree, filled))


def seconds_a_call(call: Callable[..., Any], carry: Any, args: tuple[Any, ...], turns: int) -> float:
    """Of `carry = call(carry, *args)`, called again and again without waiting in between."""
    for _ in range(WARM_UP):
        carry = call(carry, *args)
    jax.block_until_ready(carry)
    begin = time.perf_counter()
    for _ in range(turns):
        carry = call(carry, *args)
    jax.block_until_ready(carry)
    return (time.perf_counter() - begin) / turns


def copy_bandwidth(size: int, turns: int) -> float:
    """Bytes a second, read and written, of adding one to `size` bytes in place."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    return 2 * size / seconds_a_call(add, jnp.zeros(size // 4, jnp.int32), (), turns)


def kernel_times(model: DecoderConfig, batch: int, context: int, turns: int) -> list[dict[str, Any]]:
    """One row a kernel: bytes that it has to move, seconds, bytes a second. `context`: tokens in each row's cache."""
    kernels = Kernels.choose("auto", jax.default_backend())
    c, dtype = model, jnp.dtype(model.dtype)
    pages = -(-context // PAGE)
    cache = jnp.ones(((batch * pages + 1) * PAGE, c.num_kv_heads, c.head_dim), dtype)
    table = jnp.arange(1, batch * pages + 1, dtype=jnp.int32).reshape(batch, pages)
    lens = jnp.full((batch,), context, jnp.int32)
    row = c.num_kv_heads * c.head_dim * dtype.itemsize
    where = {"page_size": PAGE, "first_loc": 0, "scale": c.head_dim**-0.5}
    out = []

    def add(name: str, moved: int, call: Callable[..., Any], carry: Any, *args: Any) -> None:
        with quiet_lowering():
            taken = seconds_a_call(jax.jit(call, donate_argnums=0), carry, args, turns)
        out.append({"kernel": name, "bytes": moved, "seconds": taken, "bytes_per_second": moved / taken})

    new = jnp.ones((batch, c.num_kv_heads, c.head_dim), dtype)
    locs = table[:, 0] * PAGE
    write = kernels.kv_write
    add(
        "kv_write",
        4 * batch * row,
        lambda kv, n, at: kv_write(*kv, n, n, at, implementation=write),
        (cache, cache + 1),
        new,
        locs,
    )
    cache = jnp.ones_like(cache)
    q = jnp.ones((batch, c.num_heads, c.head_dim), dtype)
    decode = kernels.decode_attention
    add(
        "decode_attention",
        2 * batch * context * row,
        lambda q, k, v, *a: decode_attention(q, k, v, *a, **where, implementation=decode),
        q,
        cache,
        cache + 1,
        table,
        lens,
    )
    tokens = min(PROMPT, context)
    q = jnp.ones((tokens, c.num_heads, c.head_dim), dtype)
    lone = jnp.full((1,), tokens, jnp.int32)
    extend = kernels.extend_attention
    add(
        "extend_attention",
        2 * tokens * row,
        lambda q, k, v, *a: extend_attention(q, k, v, *a, **where, implementation=extend),
        q,
        cache,
        cache + 1,
        table[:1],
        lone,
        jnp.zeros_like(lone),
        lone,
    )
    logits = jax.random.normal(jax.random.key(1), (batch, c.vocab_size))
    for name, top_p in (("sample, top_p 1", 1.0), ("sample, top_p 0.9", 0.9)):
        ones, ints = jnp.ones((batch,)), jnp.zeros((batch,), jnp.int32)
        params = RowParams(ones, ones * top_p, ones * 0, ints, ints.astype(jnp.uint32), ints == 0)

        def pick(positions: jax.Array, logits: jax.Array, params: RowParams = params) -> jax.Array:
            tokens, _ = sample(logits, params, positions, implementation=kernels.sample)
            return positions + jnp.minimum(tokens, 0)  # none is below 0, which only we know

        add(name, 4 * batch * c.vocab_size, pick, ints, logits)
    return out


def decode_times(model: Decoder, batches: Sequence[int], context: int, turns: int) -> list[dict[str, Any]]:
    """Seconds of a decode step launched behind the one before, and the bytes that it has to read: weights and KV."""
    most, length = max(batches), context + turns + WARM_UP
    config = EngineConfig(model_path="none", max_running_requests=most, page_size=PAGE, kernels="auto")
    pages = -(-length // PAGE)
    buckets = Buckets(tuple(Bucket(b, b, b, True) for b in sorted(batches)), ())
    runner = JaxRunner(model, config, max_total_tokens=most * pages * PAGE, context_length=length, buckets=buckets)
    runner.warm_up()
    out = []
    for batch in sorted(batches):
        taken = _decode_time(runner, batch, context, pages, turns)
        weights, kv = weight_bytes(model), batch * context * cache_bytes(model.cache_shapes, 1)
        out.append({"batch": batch, "seconds": taken, "weight_bytes": weights, "kv_bytes": kv})
    runner.shutdown()
    return out


def _decode_time(runner: JaxRunner, batch: int, context: int, pages: int, turns: int) -> float:
    slots, index = np.arange(1, batch + 1), np.arange(pages)
    own = (slots[:, None] - 1) * pages + index + 1
    writes = np.stack([np.repeat(slots, pages), np.tile(index, batch), own.ravel()]).astype(np.int32)
    number = 0

    def step(writes: np.ndarray) -> Any:
        nonlocal number
        number += 1
        lens = np.full(batch, context + number)
        epochs = np.zeros(batch, np.int64)
        launch = Launch(number, ForwardMode.DECODE, [], slots, epochs, lens, None, None, None, 0, writes)
        return runner.launch([launch])[0]

    for i in range(WARM_UP):
        handle = step(NO_WRITES if i else writes)
    runner.block(handle)
    begin = time.perf_counter()
    for _ in range(turns):
        handle = step(NO_WRITES)
    runner.block(handle)
    return (time.perf_counter() - begin) / turns


def weight_bytes(model: Decoder) -> int:
    """Read by each step: all weights, of an embedding that is not also the head only some rows."""
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model)))
    return total if model.head is None else total - model.embedding[...].size * model.embedding[...].dtype.itemsize


def loads(model: Decoder, requests: int, lengths: tuple[int, int], slots: int, turns: int) -> list[dict[str, Any]]:
    """nano-vllm's load (random prompts, input and output lengths uniform in `lengths`, no end of sequence) and a steady
    batch of `slots` for `turns` steps, through both loops: tokens and seconds of each."""
    low, high = lengths
    context = max(2 * high, PAGE + turns) + PAGE
    config = EngineConfig(
        model_path="none",
        max_running_requests=slots,
        context_length=context,
        max_total_tokens=slots * -(-context // PAGE) * PAGE,
        page_size=PAGE,
        chunked_prefill_size=max(PAGE, min(2048, high) // PAGE * PAGE),
        random_seed=0,
    )
    total = config.max_total_tokens
    assert total is not None
    runner = JaxRunner(model, config, max_total_tokens=total, context_length=context)
    runner.warm_up()
    served = LoadedModel("random weights", model, model.config, None, context, {})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in rng.integers(low, high + 1, requests)]
    outs = [int(n) for n in rng.integers(low, high + 1, requests)]
    out = []
    for name, off in (("overlap", False), ("normal", True)):
        engine = Engine.from_parts(dataclasses.replace(config, disable_overlap_schedule=off), served, runner, total)
        _generate(engine, [[1, 2, 3]] * 2, [WARM_UP] * 2)
        steady = _generate(engine, [[1, 2, 3]] * slots, [turns] * slots)
        taken = _generate(engine, prompts, outs)
        out.append({"loop": name, "tokens": sum(outs), "seconds": taken, "steady_step_seconds": steady / turns})
    runner.shutdown()
    return out


def _generate(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> float:
    params = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 0.6} for n in lengths]
    begin = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=params)
    taken = time.perf_counter() - begin
    engine.wait_idle()
    engine.flush_cache()
    return taken
