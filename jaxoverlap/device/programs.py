"""The table of a runner's programs: made from the buckets, compiled by the warm-up, called under the compile guard."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxoverlap.device.adjustments import layout as adjustments_layout
from jaxoverlap.device.adjustments import write_adjustments
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.compile_guard import CompileGuard
from jaxoverlap.device.layout import Layout
from jaxoverlap.device.logprobs import block_of, input_layout, input_logprobs, output_layout, output_logprobs
from jaxoverlap.device.packing import PAGES_LAYOUT, sample_layout, step_layout, verify_layout
from jaxoverlap.device.state import State
from jaxoverlap.device.step import Steps, write_pages
from jaxoverlap.device.verify import draft, score, verify
from jaxoverlap.kernels.backend import quiet_lowering
from jaxoverlap.models.sharding import AXIS

Progress = Callable[[int, int, str], None]


WEIGHTS, STATE = "weights", "state"


def nothing() -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True)
class Over:
    """A mesh of data-parallel ranks (models/sharding.py), over which every program is spread: each rank runs it on its
    own share. What of the ranks lies in one array, lies there rank after rank along the first axis; `weights` are
    divided as they say."""

    mesh: jax.sharding.Mesh
    weights: tuple[PartitionSpec, ...]

    def spread(self, step: Callable[..., Any], program: Program) -> Callable[..., Any]:
        takes: list[Any] = [self.weights if name == WEIGHTS else PartitionSpec(AXIS) for name in program.takes]
        takes += [PartitionSpec(AXIS)] * (len(program.extra()) + 1)
        return jax.shard_map(
            step, mesh=self.mesh, in_specs=tuple(takes), out_specs=PartitionSpec(AXIS), check_vma=False
        )

    def shape(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Of all ranks, each with that shape."""
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.ShapeDtypeStruct((x.shape[0] * self.mesh.size, *x.shape[1:]), x.dtype, sharding=sharding)

    def zeros(self, x: jax.ShapeDtypeStruct) -> jax.Array:
        whole = self.shape(x)
        return jax.make_array_from_callback(whole.shape, whole.sharding, lambda _: np.zeros(x.shape, x.dtype))


@dataclass(slots=True)
class Program:
    """One jitted function. It `takes` the weights, the state or fields of it, then what is `extra` (arrays that another
    program has left, here their shapes), then a packed array. With `puts` it gives up that argument, and gives it back:
    the state as the first of two results, a field of it as the only one.

    Warm-up puts the compiled program into `call`: unlike a jitted function, it is not compiled anew when the process
    changes JAX's settings or imports a module that adds one."""

    name: str
    step: Callable[..., Any]
    layout: Layout
    takes: tuple[str, ...] = (WEIGHTS, STATE)
    puts: str | None = STATE
    extra: Callable[[], tuple[Any, ...]] = nothing
    over: Over | None = None
    call: Any = field(init=False)
    out: Any = field(init=False)  # shapes of the results, once lowered

    def __post_init__(self) -> None:
        step = self.step if self.over is None else self.over.spread(self.step, self)
        named = functools.wraps(self.step)(lambda *args: step(*args))
        named.__name__ = named.__qualname__ = self.name
        self.call = jax.jit(named, donate_argnums=() if self.donate is None else self.donate)

    @property
    def donate(self) -> int | None:
        """Number of the argument that is given up."""
        return None if self.puts is None else self.takes.index(self.puts)

    def arguments(self, weights: Any, state: State) -> tuple[Any, ...]:
        """What it takes, but for what is extra and the packed array."""
        there = {WEIGHTS: weights, STATE: state}
        return tuple(there[name] if name in there else getattr(state, name) for name in self.takes)

    def put(self, state: State, out: Any) -> State:
        """The state after a call that gave `out`."""
        if self.puts is None:
            return state
        return out[0] if self.puts == STATE else dataclasses.replace(state, **{self.puts: out})

    def padding(self, weights: Any, state: State) -> tuple[Any, ...]:
        """Arguments that touch nothing but the padding row and page."""
        zeros = (lambda x: jnp.zeros(x.shape, x.dtype)) if self.over is None else self.over.zeros
        packed = self.layout.empty()[0] if self.over is None else zeros(self._packed)
        return *self.arguments(weights, state), *jax.tree.map(zeros, self.extra()), packed

    def shapes(self, weights: Any, state: State) -> tuple[Any, ...]:
        """Those of its arguments; `weights` and `state` are shapes, of all ranks where there are several."""
        own = (*self.extra(), self._packed)
        return *self.arguments(weights, state), *(own if self.over is None else jax.tree.map(self.over.shape, own))

    @property
    def _packed(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.layout.size,), jnp.int32)


class Programs:
    """Programs by name. `cut`: the cut ones too, with `max_logprobs` also those that read what these leave behind. With
    a speculator decode programs are verify programs, with `cut` also such that are cut in two and take masks."""

    def __init__(
        self,
        steps: Steps,
        buckets: Buckets,
        *,
        vocab_size: int,
        script_len: int = 0,
        cut: bool = False,
        max_logprobs: int = 0,
        over: Over | None = None,
    ) -> None:
        self.guard = CompileGuard()
        self.table: dict[str, Program] = {}
        self._over = over
        entries = adjustments_layout(vocab_size)
        write = functools.partial(write_adjustments, entries)
        self._add("write_pages", write_pages, PAGES_LAYOUT, ("page_table",), "page_table")
        self._add("write_adjustments", write, entries, ("tables",), "tables")
        whole = (*buckets.decode, *buckets.extend)
        next_ids = steps.speculator is not None and bool(steps.speculator.layers)
        if steps.speculator is not None:
            whole = buckets.extend
            for bucket in buckets.decode:
                self._add_verifying(steps, bucket, steps.speculator.num_draft_tokens, vocab_size if cut else None)
        for bucket in whole:
            layout = step_layout(bucket, script_len, next_ids)
            self._add(bucket.name, steps.fused(bucket, layout), layout)
            if not cut:
                continue
            self._add(f"forward_{bucket.name}", steps.forward(bucket, layout), layout)
            self._add_sampling(steps, bucket, vocab_size, max_logprobs)

    def _add(
        self,
        name: str,
        step: Callable[..., Any],
        layout: Layout,
        takes: tuple[str, ...] = (WEIGHTS, STATE),
        puts: str | None = STATE,
        extra: Callable[[], tuple[Any, ...]] = nothing,
    ) -> None:
        if name not in self.table:
            self.table[name] = Program(name, step, layout, takes, puts, extra, self._over)

    def _add_verifying(self, steps: Steps, bucket: Bucket, tokens: int, masked: int | None) -> None:
        """`masked`: the vocabulary of masks, where there may be some."""
        layout = verify_layout(bucket, tokens, None)
        self._add(f"verify_{bucket.rows}", verify(steps, layout), layout)
        if masked is None:
            return

        def drafts() -> tuple[Any, ...]:
            return (jax.ShapeDtypeStruct((tokens - 1, bucket.rows), jnp.int32),)

        layout = verify_layout(bucket, tokens, masked)
        self._add(f"draft_{bucket.rows}", draft(steps, layout), layout)
        self._add(f"score_{bucket.rows}", score(steps, layout), layout, (WEIGHTS, STATE), STATE, drafts)

    def _add_sampling(self, steps: Steps, bucket: Bucket, vocab_size: int, max_logprobs: int) -> None:
        """What follows `forward`: sampling and, with `max_logprobs`, details; named by rows, buckets may share them."""
        forward = self.table[f"forward_{bucket.name}"]
        logits = jax.ShapeDtypeStruct((bucket.rows, vocab_size), jnp.float32)
        faults = jax.ShapeDtypeStruct((bucket.rows,), jnp.int32) if steps.poison else None
        layout = sample_layout(bucket.rows, vocab_size)
        self._add(f"sample_{bucket.rows}", steps.sample(layout), layout, (STATE,), STATE, lambda: ((logits, faults),))
        if not max_logprobs:
            return
        layout = output_layout(bucket.rows, max_logprobs)
        self._add(f"output_logprobs_{bucket.rows}", output_logprobs(layout), layout, (), None, lambda: (logits,))
        if bucket.is_decode:
            return
        layout = input_layout(bucket, max_logprobs)
        step = input_logprobs(steps.graph, steps.tree, block_of(bucket), layout)
        name = f"input_logprobs_{bucket.tokens}"
        self._add(name, step, layout, (WEIGHTS,), None, lambda: (forward.out[2],))

    def __getitem__(self, name: str) -> Program:
        """Raises RuntimeError after `close`."""
        if not self.table:
            raise RuntimeError("the runner is shut down")
        return self.table[name]

    def call(self, program: Program, *args: Any) -> Any:
        if type(program.call) is jax.stages.Compiled:  # refuses other shapes: nothing to guard
            return program.call(*args)
        self.guard.program = program.name
        with self.guard, quiet_lowering():
            return program.call(*args)

    def warm_up(self, weights: Any, state: State, platform: str, progress: Progress | None) -> State:
        """Compiles all, on CPU several at once; from then on a compile raises CompileError. Gives the state back."""
        total = len(self.table)
        report = progress or (lambda done, total, name: None)
        report(0, total, "")
        on_cpu = platform == "cpu"
        with ThreadPoolExecutor((os.cpu_count() or 1) if on_cpu else 1) as pool:
            compiling: dict[Future[Any], Program] = {}
            for program in self.table.values():
                with quiet_lowering():
                    lowered = program.call.lower(*program.padding(weights, state))
                program.out = lowered.out_info
                compiling[pool.submit(lowered.compile)] = program
            for done, future in enumerate(as_completed(compiling), 1):
                compiling[future].call = future.result()
                report(done, total, compiling[future].name)
        self.guard.compiles += total
        if not on_cpu:  # loads the programs, and finds out now whether their working memory is there
            for program in self.table.values():
                state = program.put(state, self.call(program, *program.padding(weights, state)))
            jax.block_until_ready(state)
        self.guard.armed = True
        return state

    def close(self) -> None:
        self.guard.close()
        self.table = {}
