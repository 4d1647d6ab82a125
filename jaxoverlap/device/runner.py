"""JaxRunner: runs launches on the device, one jitted program a step, and never waits but in `wait`."""

from __future__ import annotations

import contextlib
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
from flax import nnx

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Sample, StepResult
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.compile_guard import CompileGuard
from jaxoverlap.device.packing import (
    PAGE_WRITES,
    PAGES_LAYOUT,
    Layout,
    pack_pages,
    pack_sample,
    pack_step,
    pack_verify,
    sample_layout,
    step_layout,
    verify_layout,
)
from jaxoverlap.device.state import Script, initial_state
from jaxoverlap.device.step import FAULT_NONE, FAULT_UNWRITTEN, Outputs, Speculator, Steps, write_pages
from jaxoverlap.kernels.backend import choose, quiet_lowering
from jaxoverlap.models.paged import Model

Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class Program:
    """One jitted step function; `donate` is the place of the state among its arguments. Warm-up puts the compiled
    program into `call`: unlike a jitted function, it is not compiled anew when the process changes JAX's settings or
    imports a module that adds one."""

    name: str
    step: Callable[..., Any]
    layout: Layout
    donate: int
    call: Any = field(init=False)

    def __post_init__(self) -> None:
        named = functools.wraps(self.step)(lambda *args: self.step(*args))
        named.__name__ = named.__qualname__ = self.name
        self.call = jax.jit(named, donate_argnums=self.donate)


class Handle:
    """A step on its way; opaque to callers."""

    __slots__ = ("bucket", "launch", "logits", "outputs")

    def __init__(self, launch: Launch, bucket: Bucket) -> None:
        self.launch = launch
        self.bucket = bucket
        self.outputs: Outputs | None = None
        self.logits: tuple[jax.Array, jax.Array | None] | None = None  # and faults, until sampled

    def send_back(self, outputs: Outputs) -> None:
        self.outputs = outputs
        for array in (outputs.tokens, outputs.logprobs, outputs.faults, outputs.verified):
            if array is not None:
                array.copy_to_host_async()


class JaxRunner:
    """core.Runner on one JAX device, for one rank.

    `model` is an nnx module with its weights on the device. `max_total_tokens` is the KV pool, a multiple
    of the page size, beside which one page for padding is kept. `masks`: also warm up the cut programs that launches
    with `delay_sample` or a mask need; without it such a launch is refused. `script`: forced outputs, see Script. With a
    `speculator` decode launches are verify steps. `buckets`: other shapes than `config` gives.

    All calls come from one thread. Launches run in order; a failed step leaves the runner unusable. Raises ValueError
    for lengths that do not fit, naming them.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        max_total_tokens: int,
        context_length: int,
        masks: bool = False,
        script: Script | None = None,
        speculator: Speculator | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        if max_total_tokens % config.page_size:
            raise ValueError(f"max_total_tokens {max_total_tokens} must be a multiple of page_size {config.page_size}")
        self.buckets = buckets or Buckets.of(config, context_length=context_length, max_total_tokens=max_total_tokens)
        self.num_pages = max_total_tokens // config.page_size
        self._rows = config.max_running_requests + 1
        self._table_pages = -(-(context_length + 2 * config.verify_reserve) // config.page_size)
        self._vocab_size: int = model.config.vocab_size
        self._masks, self._script, self._poison = masks, script, config.poison_future_map
        self._speculator = speculator
        num_locs = (self.num_pages + 1) * config.page_size
        shapes = model.cache_shapes(num_locs)
        for shape in shapes:
            if shape.shape[0] >= 1 << 31:
                raise ValueError(f"max_total_tokens {max_total_tokens}: {shape.shape[0]} cache rows are over 2**31")
        self._state = initial_state(
            shapes,
            rows=self._rows,
            pages=self._table_pages,
            poison=self._poison,
            script_len=script.length if script else 0,
        )
        self._platform = next(iter(self._state.page_table.devices())).platform
        graph, params = nnx.split(model)
        leaves, tree = jax.tree.flatten(params)
        self._weights = tuple(leaves)
        self._steps = Steps(
            graph=graph,
            tree=tree,
            page_size=config.page_size,
            num_locs=num_locs,
            scatter_with=choose("future_map_scatter", config.kernels, self._platform),
            gather_with=choose("future_map_gather", config.kernels, self._platform),
            poison=self._poison,
        )
        self._guard = CompileGuard()
        self._programs = self._make_programs()

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of all programs, which `warm_up` compiles and none is added to."""
        return tuple(self._programs)

    @property
    def compiles(self) -> int:
        """Compiles that this runner's calls have caused."""
        return self._guard.compiles

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program, on CPU several at once; from then on a compile raises CompileError.

        `progress(done, total, name)` is told the program just compiled; at first (0, total, "").
        """
        total = len(self._programs)
        report = progress or (lambda done, total, name: None)
        report(0, total, "")
        on_cpu = self._platform == "cpu"
        with ThreadPoolExecutor((os.cpu_count() or 1) if on_cpu else 1) as pool:
            compiling: dict[Future[Any], Program] = {}
            for program in self._programs.values():
                with quiet_lowering():
                    lowered = program.call.lower(*self._padding(program))
                compiling[pool.submit(lowered.compile)] = program
            for done, future in enumerate(as_completed(compiling), 1):
                compiling[future].call = future.result()
                report(done, total, compiling[future].name)
        self._guard.compiles += total
        if not on_cpu:  # loads the programs, and finds out now whether their working memory is there
            for program in self._programs.values():
                self._run_on_padding(program)
            jax.block_until_ready(self._state)
        self._guard.armed = True

    def launch(self, launches: list[Launch]) -> list[Handle]:
        """One launch, one rank. Raises ValueError for a launch that no bucket holds or that names slots or pages out of
        range, RuntimeError after `shutdown`."""
        (launch,) = launches
        bucket = self._bucket(launch)
        _check_range(f"launch {launch.number}: slot", launch.slots, self._rows)
        if self._speculator is not None and bucket.is_decode:
            return [self._verify(launch, bucket)]
        cut = launch.delay_sample or launch.mask is not None
        if cut and not self._masks:
            raise ValueError(f"launch {launch.number} needs the cut programs: make the runner with masks=True")
        program = self._program(f"forward_{bucket.name}" if cut else bucket.name)
        page_writes = self._write_pages_ahead(launch, bucket.writes)
        packed = pack_step(program.layout, launch, page_writes, self._script)
        handle = Handle(launch, bucket)
        if not cut:
            self._state, outputs = self._call(program, self._weights, self._state, packed)
            handle.send_back(outputs)
            return [handle]
        self._state, logits, faults = self._call(program, self._weights, self._state, packed)
        handle.logits = logits, faults
        if not launch.delay_sample:
            self._sample(handle, launch.mask)
        return [handle]

    def sample(self, samples: list[Sample]) -> None:
        """Masks and samples a launch that had `delay_sample`. Raises ValueError for one already sampled."""
        (late,) = samples
        self._sample(late.handle, late.mask)

    def wait(self, handle: Handle) -> StepResult:
        """Blocks until the step is done; the one place that fetches from the device. Raises RuntimeError for a launch
        not sampled yet, and with `poison_future_map` for a row that read what no step had just written for it."""
        launch, outputs = handle.launch, handle.outputs
        if outputs is None:
            raise RuntimeError(f"launch {launch.number} is not sampled yet")
        rows = len(launch.slots)
        if outputs.faults is not None:
            _raise_faults(launch, np.asarray(outputs.faults)[:rows])
        accepted, lens, bonus = (None,) * 3 if outputs.verified is None else np.asarray(outputs.verified)[:, :rows]
        return StepResult(
            np.asarray(outputs.tokens)[:rows],
            logprobs=np.asarray(outputs.logprobs)[:rows],
            accept_lens=accepted,
            seq_lens_in=lens,
            bonus_in=bonus,
        )

    def is_ready(self, handle: Handle) -> bool:
        return handle.outputs is not None and handle.outputs.tokens.is_ready()  # type: ignore[attr-defined]

    def block(self, handle: Handle) -> None:
        """Returns once what has been launched for `handle` (the forward alone, before `sample`) is done; any thread."""
        jax.block_until_ready(handle.logits if handle.outputs is None else handle.outputs)

    def shutdown(self) -> None:
        """Waits for the device, then lets go of weights, state and programs. Twice is once."""
        leaves = jax.tree.leaves(self._state)
        jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])  # deleted: a step failed
        self._guard.close()
        self._programs = {}
        self._weights = ()
        self._state = None  # type: ignore[assignment]

    def _verify(self, launch: Launch, bucket: Bucket) -> Handle:
        if launch.mask is not None and not self._masks:
            raise ValueError(f"launch {launch.number} has a mask: make the runner with masks=True")
        program = self._program(f"verify_{bucket.rows}")
        packed = pack_verify(program.layout, launch, self._write_pages_ahead(launch, bucket.writes))
        handle = Handle(launch, bucket)
        self._state, outputs = self._call(program, self._weights, self._state, packed)
        handle.send_back(outputs)
        return handle

    def _make_programs(self) -> dict[str, Program]:
        programs = [Program("write_pages", write_pages, PAGES_LAYOUT, donate=0)]
        script_len = self._script.length if self._script else 0
        whole = (*self.buckets.decode, *self.buckets.extend)
        if self._speculator is not None:
            programs += [self._verify_program(bucket, self._speculator) for bucket in self.buckets.decode]
            whole = self.buckets.extend
        for bucket in whole:
            layout = step_layout(bucket, script_len)
            programs.append(Program(bucket.name, self._steps.fused(bucket, layout), layout, donate=1))
            if self._masks:
                forward = self._steps.forward(bucket, layout)
                programs.append(Program(f"forward_{bucket.name}", forward, layout, donate=1))
        for bucket in self.buckets.decode if self._masks else ():
            layout = sample_layout(bucket.rows, self._vocab_size)
            programs.append(Program(f"sample_{bucket.rows}", self._steps.sample(layout), layout, donate=0))
        return {p.name: p for p in programs}

    def _verify_program(self, bucket: Bucket, speculator: Speculator) -> Program:
        layout = verify_layout(bucket, speculator.num_draft_tokens, self._vocab_size if self._masks else None)
        return Program(f"verify_{bucket.rows}", self._steps.verify(bucket, layout, speculator), layout, donate=1)

    def _program(self, name: str) -> Program:
        if not self._programs:
            raise RuntimeError("the runner is shut down")
        return self._programs[name]

    def _call(self, program: Program, *args: Any) -> Any:
        self._guard.program = program.name
        with self._guard, contextlib.nullcontext() if self._guard.armed else quiet_lowering():
            return program.call(*args)

    def _bucket(self, launch: Launch) -> Bucket:
        rows = len(launch.slots)
        if not launch.mode.is_extend:
            return self.buckets.for_decode(rows)
        tokens = launch.num_decoding + (0 if launch.input_ids is None else len(launch.input_ids))
        return self.buckets.for_extend(tokens, rows)

    def _write_pages_ahead(self, launch: Launch, room: int) -> np.ndarray:
        """Sends the page writes that the step's array has no room for; gives the rest."""
        page_writes = launch.page_writes
        if page_writes.size:
            limits = (self._rows, self._table_pages, self.num_pages + 1)
            for name, entries, limit in zip(("slot", "index", "page"), page_writes, limits):
                _check_range(f"launch {launch.number}: page_writes: {name}", entries, limit)
            if self._poison:
                _check_distinct(launch)
        while page_writes.shape[1] > room:
            now, page_writes = page_writes[:, :PAGE_WRITES], page_writes[:, PAGE_WRITES:]
            table = self._call(self._program("write_pages"), self._state.page_table, pack_pages(now))
            self._state = dataclasses.replace(self._state, page_table=table)
        return page_writes

    def _sample(self, handle: Handle, mask: np.ndarray | None) -> None:
        if handle.logits is None:
            raise ValueError(f"launch {handle.launch.number} is sampled already")
        (logits, faults), handle.logits = handle.logits, None
        program = self._program(f"sample_{handle.bucket.rows}")
        packed = pack_sample(program.layout, handle.launch, mask)
        self._state, tokens, logprobs = self._call(program, self._state, logits, packed)
        handle.send_back(Outputs(tokens, logprobs, faults))

    def _padding(self, program: Program) -> tuple[Any, ...]:
        """Arguments of a program that touch nothing but the padding row and page."""
        packed, _ = program.layout.empty()
        if program.name == "write_pages":
            return self._state.page_table, packed
        if program.name.startswith("sample_"):
            rows = program.layout.shapes["slots"][0]
            return self._state, jnp.zeros((rows, self._vocab_size), jnp.float32), packed
        return self._weights, self._state, packed

    def _run_on_padding(self, program: Program) -> None:
        out = self._call(program, *self._padding(program))
        if program.name == "write_pages":
            self._state = dataclasses.replace(self._state, page_table=out)
        else:
            self._state = out[0]


def _check_range(name: str, values: np.ndarray, limit: int) -> None:
    if values.size and not 0 <= values.min() <= values.max() < limit:
        raise ValueError(f"{name} must be at least 0 and below {limit}, not {values.min()} to {values.max()}")


def _check_distinct(launch: Launch) -> None:
    """An entry named twice with the same page is harmless; with two pages the order of a scatter would decide."""
    entries, with_pages = (len(np.unique(x, axis=1).T) for x in (launch.page_writes[:2], launch.page_writes))
    if entries < with_pages:
        raise ValueError(f"launch {launch.number} writes an entry of the page table twice")


def _raise_faults(launch: Launch, faults: np.ndarray) -> None:
    for row in np.flatnonzero(faults != FAULT_NONE):
        slot = int(launch.slots[row])
        what = "a row that no step had written since" if faults[row] == FAULT_UNWRITTEN else "another length's row"
        raise RuntimeError(f"launch {launch.number}: slot {slot} read {what} from the FutureMap")
