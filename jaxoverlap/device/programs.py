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

from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.compile_guard import CompileGuard
from jaxoverlap.device.logprobs import block_of, input_layout, input_logprobs, output_layout, output_logprobs
from jaxoverlap.device.packing import PAGES_LAYOUT, Layout, sample_layout, step_layout, verify_layout
from jaxoverlap.device.state import State
from jaxoverlap.device.step import Speculator, Steps, write_pages
from jaxoverlap.kernels.backend import quiet_lowering

Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Program:
    """One jitted function; `donate` is the place of the state among its arguments, None where it touches none. Warm-up
    puts the compiled program into `call`: unlike a jitted function, it is not compiled anew when the process changes
    JAX's settings or imports a module that adds one."""

    name: str
    step: Callable[..., Any]
    layout: Layout
    donate: int | None
    source: Program | None = None  # the forward program whose hidden states it reads
    call: Any = field(init=False)
    out: Any = field(init=False)  # shapes of the results, once lowered

    def __post_init__(self) -> None:
        named = functools.wraps(self.step)(lambda *args: self.step(*args))
        named.__name__ = named.__qualname__ = self.name
        self.call = jax.jit(named, donate_argnums=() if self.donate is None else self.donate)

    def padding(self, weights: Any, state: State, vocab_size: int, poison: bool = False) -> tuple[Any, ...]:
        """Arguments that touch nothing but the padding row and page; the state may be one of shapes."""
        packed, _ = self.layout.empty()
        if self.name == "write_pages":
            return state.page_table, packed
        if self.name.startswith("sample_"):
            rows = self.layout.shapes["slots"][0]
            faults = jnp.zeros((rows,), jnp.int32) if poison else None
            return state, (jnp.zeros((rows, vocab_size), jnp.float32), faults), packed
        if self.name.startswith("output_logprobs_"):
            return jnp.zeros((self.layout.shapes["chosen"][0], vocab_size), jnp.float32), packed
        if self.source is not None:
            hidden = self.source.out[2]
            return weights, jnp.zeros(hidden.shape, hidden.dtype), packed
        return weights, state, packed


class Programs:
    """Programs by name. `cut`: the cut ones too, with `max_logprobs` also those that read what these leave behind. With
    a `speculator` decode programs are verify programs."""

    def __init__(
        self,
        steps: Steps,
        buckets: Buckets,
        *,
        vocab_size: int,
        script_len: int = 0,
        cut: bool = False,
        max_logprobs: int = 0,
        speculator: Speculator | None = None,
    ) -> None:
        self.guard = CompileGuard()
        self._vocab_size = vocab_size
        self._poison = steps.poison
        self._cut = cut
        programs = [Program("write_pages", write_pages, PAGES_LAYOUT, donate=0)]
        whole = (*buckets.decode, *buckets.extend)
        if speculator is not None:
            programs += [self._verify(steps, bucket, speculator) for bucket in buckets.decode]
            whole = buckets.extend
        for bucket in whole:
            layout = step_layout(bucket, script_len)
            programs.append(Program(bucket.name, steps.fused(bucket, layout), layout, donate=1))
            if cut:
                programs.append(Program(f"forward_{bucket.name}", steps.forward(bucket, layout), layout, donate=1))
            if max_logprobs and not bucket.is_decode:
                layout, block = input_layout(bucket, max_logprobs), block_of(bucket)
                step = input_logprobs(steps.graph, steps.tree, block, layout)
                name = f"input_logprobs_{bucket.tokens}"
                programs.append(Program(name, step, layout, donate=None, source=programs[-1]))
        for bucket in buckets.decode if cut else ():
            layout = sample_layout(bucket.rows, vocab_size)
            programs.append(Program(f"sample_{bucket.rows}", steps.sample(layout), layout, donate=0))
        for bucket in buckets.decode if max_logprobs else ():
            layout = output_layout(bucket.rows, max_logprobs)
            programs.append(Program(f"output_logprobs_{bucket.rows}", output_logprobs(layout), layout, donate=None))
        self.table = {p.name: p for p in programs}

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
                    lowered = program.call.lower(*program.padding(weights, state, self._vocab_size, self._poison))
                program.out = lowered.out_info
                compiling[pool.submit(lowered.compile)] = program
            for done, future in enumerate(as_completed(compiling), 1):
                compiling[future].call = future.result()
                report(done, total, compiling[future].name)
        self.guard.compiles += total
        if not on_cpu:  # loads the programs, and finds out now whether their working memory is there
            for program in self.table.values():
                state = self._run_on_padding(program, weights, state)
            jax.block_until_ready(state)
        self.guard.armed = True
        return state

    def close(self) -> None:
        self.guard.close()
        self.table = {}

    def _run_on_padding(self, program: Program, weights: Any, state: State) -> State:
        out = self.call(program, *program.padding(weights, state, self._vocab_size, self._poison))
        if program.donate is None:
            return state
        return dataclasses.replace(state, page_table=out) if program.name == "write_pages" else out[0]

    def _verify(self, steps: Steps, bucket: Bucket, speculator: Speculator) -> Program:
        layout = verify_layout(bucket, speculator.num_draft_tokens, self._vocab_size if self._cut else None)
        return Program(f"verify_{bucket.rows}", steps.verify(bucket, layout, speculator), layout, donate=1)
