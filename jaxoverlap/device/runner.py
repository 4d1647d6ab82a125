"""JaxRunner: runs launches on the device, one jitted program a step, and never waits but in `wait`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Sample, StepResult
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.packing import (
    PAGE_WRITES,
    next_packed,
    pack_pages,
    pack_sample,
    pack_step,
    pack_verify,
    unpack_outputs,
)
from jaxoverlap.device.parameters import Parameters
from jaxoverlap.device.programs import Program, Programs, Progress
from jaxoverlap.device.state import Script, initial_state
from jaxoverlap.device.step import FAULT_NONE, FAULT_UNWRITTEN, Logits, Outputs, Speculator, Steps
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.models.paged import Model


class Handle:
    """A step on its way; opaque to callers."""

    __slots__ = ("bucket", "launch", "logits", "outputs")

    def __init__(self, launch: Launch, bucket: Bucket) -> None:
        self.launch = launch
        self.bucket = bucket
        self.outputs: Outputs | None = None
        self.logits: Logits | None = None  # until sampled

    def send_back(self, outputs: Outputs) -> None:
        self.outputs = outputs
        outputs.fetched.copy_to_host_async()


@dataclass(frozen=True, slots=True)
class _Resident:
    """The packed array on the device of the decode step to come, should rows stay and take no page."""

    program: Program
    expected: np.ndarray
    array: jax.Array


class JaxRunner:
    """core.Runner on one JAX device, for one rank.

    `model` is an nnx module with its weights on the device. `max_total_tokens` is the KV pool, a multiple of the page
    size, beside which one page for padding is kept. `masks`: also warm up the cut programs that launches with
    `delay_sample` or a mask need; without it such a launch is refused. `script`: forced outputs, see Script. With a
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
        self._masks, self._script, self._poison = masks, script, config.poison_future_map
        self._speculator = speculator
        self._resident: _Resident | None = None
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
        self._parameters = Parameters(model)
        self._weights = self._parameters.leaves()
        steps = Steps(
            graph=graph,
            tree=jax.tree.structure(params),
            page_size=config.page_size,
            num_locs=num_locs,
            kernels=Kernels.choose(config.kernels, self._platform),
            poison=self._poison,
        )
        self._programs = Programs(
            steps,
            self.buckets,
            vocab_size=model.config.vocab_size,
            script_len=script.length if script else 0,
            masks=masks,
            speculator=speculator,
        )

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of all programs, which `warm_up` compiles and none is added to."""
        return tuple(self._programs.table)

    @property
    def compiles(self) -> int:
        """Compiles that this runner's calls have caused."""
        return self._programs.guard.compiles

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every program, on CPU several at once; from then on a compile raises CompileError.

        `progress(done, total, name)` is told the program just compiled; at first (0, total, "").
        """
        self._state = self._programs.warm_up(self._weights, self._state, self._platform, progress)

    def launch(self, launches: list[Launch]) -> list[Handle]:
        """One launch, one rank. Raises ValueError for a launch that no bucket holds or that names slots or pages out of
        range, RuntimeError after `shutdown`."""
        (launch,) = launches
        bucket = self._bucket(launch)
        _check_range(launch, "slot", launch.slots, self._rows)
        if self._speculator is not None and bucket.is_decode:
            return [self._verify(launch, bucket)]
        cut = launch.delay_sample or launch.mask is not None
        if cut and not self._masks:
            raise ValueError(f"launch {launch.number} needs the cut programs: make the runner with masks=True")
        program = self._programs[f"forward_{bucket.name}" if cut else bucket.name]
        page_writes = self._write_pages_ahead(launch, bucket.writes)
        packed = pack_step(program.layout, launch, page_writes, self._script)
        handle = Handle(launch, bucket)
        if not cut:
            sent = self._resident_or(program, packed)
            self._state, outputs = self._call(program, self._weights, self._state, sent)
            handle.send_back(outputs)
            if outputs.again is not None:
                expected = next_packed(program.layout, program.layout.fields(packed), np)
                self._resident = _Resident(program, expected, outputs.again)
            return [handle]
        self._state, handle.logits = self._call(program, self._weights, self._state, packed)
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
        drafts = None
        if self._speculator is not None and handle.bucket.is_decode:
            drafts = self._speculator.num_draft_tokens
        tokens, logprobs, *more = (x[:rows] for x in unpack_outputs(_fetch(outputs.fetched), drafts))
        if drafts is not None:
            accepted, lens, bonus = more
            return StepResult(tokens, accepted, lens, bonus, logprobs)
        if more:
            _raise_faults(launch, more[0])
        return StepResult(tokens, logprobs=logprobs)

    def is_ready(self, handle: Handle) -> bool:
        return handle.outputs is not None and handle.outputs.fetched.is_ready()  # type: ignore[attr-defined]

    def block(self, handle: Handle) -> None:
        """Returns once what has been launched for `handle` (the forward alone, before `sample`) is done; any thread."""
        jax.block_until_ready(handle.logits if handle.outputs is None else handle.outputs)

    def check_weights(self, new: Mapping[str, Any]) -> None:
        """Raises ValueError naming the first of the parameters, by dotted path, that `update_weights` would refuse."""
        self._parameters.check(new)

    def update_weights(self, new: dict[str, Any]) -> None:
        """Other weights, copied to where the former are, for the launches to come; no program is compiled anew. `new`
        is emptied on the way, so that one parameter at a time is there twice. Raises ValueError as `check_weights`
        does, before anything changes; after any other error the runner is unusable."""
        self._parameters.check(new)
        jax.block_until_ready(self._state)
        self._weights = ()  # so that nothing keeps the former ones
        self._parameters.replace(new)
        self._weights = self._parameters.leaves()

    def shutdown(self) -> None:
        """Waits for the device, then lets go of weights, state and programs. Twice is once."""
        leaves = jax.tree.leaves(self._state)
        jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])  # deleted: a step failed
        self._programs.close()
        self._weights = ()
        self._parameters = None  # type: ignore[assignment]
        self._resident = None
        self._state = None  # type: ignore[assignment]

    def _verify(self, launch: Launch, bucket: Bucket) -> Handle:
        if launch.mask is not None and not self._masks:
            raise ValueError(f"launch {launch.number} has a mask: make the runner with masks=True")
        program = self._programs[f"verify_{bucket.rows}"]
        packed = pack_verify(program.layout, launch, self._write_pages_ahead(launch, bucket.writes))
        handle = Handle(launch, bucket)
        self._state, outputs = self._call(program, self._weights, self._state, packed)
        handle.send_back(outputs)
        return handle

    def _resident_or(self, program: Program, packed: np.ndarray) -> np.ndarray | jax.Array:
        """What is on the device already, where it equals `packed`: then nothing goes up."""
        there = self._resident
        if there is not None and there.program is program and np.array_equal(there.expected, packed):
            return there.array
        return packed

    def _call(self, program: Program, *args: Any) -> Any:
        return self._programs.call(program, *args)

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
            _check_range(launch, "page_writes: slot", page_writes[0], self._rows)
            _check_range(launch, "page_writes: index", page_writes[1], self._table_pages)
            _check_range(launch, "page_writes: page", page_writes[2], self.num_pages + 1)
            if self._poison:
                _check_distinct(launch)
        while page_writes.shape[1] > room:
            now, page_writes = page_writes[:, :PAGE_WRITES], page_writes[:, PAGE_WRITES:]
            table = self._call(self._programs["write_pages"], self._state.page_table, pack_pages(now))
            self._state = dataclasses.replace(self._state, page_table=table)
        return page_writes

    def _sample(self, handle: Handle, mask: np.ndarray | None) -> None:
        if handle.logits is None:
            raise ValueError(f"launch {handle.launch.number} is sampled already")
        logits, handle.logits = handle.logits, None
        program = self._programs[f"sample_{handle.bucket.rows}"]
        packed = pack_sample(program.layout, handle.launch, mask)
        self._state, outputs = self._call(program, self._state, logits, packed)
        handle.send_back(outputs)


def _fetch(array: jax.Array) -> np.ndarray:
    """The one way from the device to the host, once a step."""
    return np.asarray(array)


def _check_range(launch: Launch, what: str, values: np.ndarray, limit: int) -> None:
    """`values` int32."""
    if values.size and values.view(np.uint32).max() >= limit:  # negative ones too, in one pass
        raise ValueError(
            f"launch {launch.number}: {what} must be at least 0 and below {limit}, not {values.min()} to {values.max()}"
        )


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
