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

Progress = Callable[[int, int, str], None]


def whole_state(state: State, out: Any) -> State:
    """Of a program that gives (state, results) back."""
    return out[0]


def untouched(state: State, out: Any) -> State:
    return state


def replaces(name: str) -> Callable[[State, Any], State]:
    """Of a program that takes and gives back one field of the state."""
    return lambda state, out: dataclasses.replace(state, **{name: out})


def weights_and_state(weights: Any, state: State) -> tuple[Any, ...]:
    return weights, state


@dataclass(slots=True)
class Program:
    """One jitted function. It is called with what `arguments(weights, state)` gives (on padding: those of a step are
    the caller's) and a packed array; of these number `donate` is given up, None: none. `put(state, results)` is the
    state after the call.

    Warm-up puts the compiled program into `call`: unlike a jitted function, it is not compiled anew when the process
    changes JAX's settings or imports a module that adds one."""

    name: str
    step: Callable[..., Any]
    layout: Layout
    donate: int | None = 1
    arguments: Callable[[Any, State], tuple[Any, ...]] = weights_and_state
    put: Callable[[State, Any], State] = whole_state
    call: Any = field(init=False)
    out: Any = field(init=False)  # shapes of the results, once lowered

    def __post_init__(self) -> None:
        named = functools.wraps(self.step)(lambda *args: self.step(*args))
        named.__name__ = named.__qualname__ = self.name
        self.call = jax.jit(named, donate_argnums=() if self.donate is None else self.donate)

    def padding(self, weights: Any, state: State) -> tuple[Any, ...]:
        """Arguments that touch nothing but the padding row and page; the state may be one of shapes."""
        return *self.arguments(weights, state), self.layout.empty()[0]


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
    ) -> None:
        self.guard = CompileGuard()
        self.table: dict[str, Program] = {}
        pages = Program(
            "write_pages", write_pages, PAGES_LAYOUT, 0, lambda _, s: (s.page_table,), replaces("page_table")
        )
        entries = adjustments_layout(vocab_size)
        write = functools.partial(write_adjustments, entries)
        tables = Program("write_adjustments", write, entries, 0, lambda _, s: (s.tables,), replaces("tables"))
        for program in (pages, tables):
            self._add(program)
        whole = (*buckets.decode, *buckets.extend)
        if steps.speculator is not None:
            whole = buckets.extend
            for bucket in buckets.decode:
                self._add_verifying(steps, bucket, steps.speculator.num_draft_tokens, vocab_size if cut else None)
        for bucket in whole:
            layout = step_layout(bucket, script_len)
            self._add(Program(bucket.name, steps.fused(bucket, layout), layout))
            if not cut:
                continue
            forward = Program(f"forward_{bucket.name}", steps.forward(bucket, layout), layout)
            self._add(forward)
            self._add_sampling(steps, bucket, forward, vocab_size, max_logprobs)

    def _add(self, program: Program) -> None:
        self.table.setdefault(program.name, program)

    def _add_verifying(self, steps: Steps, bucket: Bucket, tokens: int, masked: int | None) -> None:
        """`masked`: the vocabulary of masks, where there may be some."""
        layout = verify_layout(bucket, tokens, None)
        self._add(Program(f"verify_{bucket.rows}", verify(steps, layout), layout))
        if masked is None:
            return

        def drafted(weights: Any, state: State) -> tuple[Any, ...]:
            return weights, state, jnp.zeros((tokens - 1, bucket.rows), jnp.int32)

        layout = verify_layout(bucket, tokens, masked)
        self._add(Program(f"draft_{bucket.rows}", draft(steps, layout), layout))
        self._add(Program(f"score_{bucket.rows}", score(steps, layout), layout, 1, drafted))

    def _add_sampling(self, steps: Steps, bucket: Bucket, forward: Program, vocab_size: int, max_logprobs: int) -> None:
        """What follows `forward`: sampling and, with `max_logprobs`, details; named by rows, buckets may share them."""

        def logits(*_: Any) -> jax.Array:
            return jnp.zeros((bucket.rows, vocab_size), jnp.float32)

        def sampled(_: Any, state: State) -> tuple[Any, ...]:
            return state, (logits(), jnp.zeros((bucket.rows,), jnp.int32) if steps.poison else None)

        def hidden(weights: Any, _: State) -> tuple[Any, ...]:
            shape = forward.out[2]
            return weights, jnp.zeros(shape.shape, shape.dtype)

        layout = sample_layout(bucket.rows, vocab_size)
        self._add(Program(f"sample_{bucket.rows}", steps.sample(layout), layout, 0, sampled))
        if not max_logprobs:
            return
        layout = output_layout(bucket.rows, max_logprobs)
        name = f"output_logprobs_{bucket.rows}"
        self._add(Program(name, output_logprobs(layout), layout, None, lambda *_: (logits(),), untouched))
        if bucket.is_decode:
            return
        layout = input_layout(bucket, max_logprobs)
        step = input_logprobs(steps.graph, steps.tree, block_of(bucket), layout)
        self._add(Program(f"input_logprobs_{bucket.tokens}", step, layout, None, hidden, untouched))

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
