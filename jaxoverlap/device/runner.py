"""JaxRunner: runs launches on the device, one jitted program a step, and never waits but in `wait`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Sample, StepResult
from jaxoverlap.device import fetching
from jaxoverlap.device.adjustments import launch_adjustments
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.handle import Handle
from jaxoverlap.device.launch_checks import SlotRange, raise_faults
from jaxoverlap.device.logprobs import launch_details
from jaxoverlap.device.packing import (
    next_packed,
    pack_pages,
    pack_sample,
    pack_step,
    pack_verify,
    unpack_outputs,
)
from jaxoverlap.device.page_writes import PageWrites
from jaxoverlap.device.parameters import Parameters
from jaxoverlap.device.programs import Program, Programs, Progress
from jaxoverlap.device.state import Script, initial_state
from jaxoverlap.device.step import Steps
from jaxoverlap.device.verify import Speculator
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.models.paged import Model


@dataclass(frozen=True, slots=True)
class _Resident:
    """The packed array on the device of the decode step to come, should rows stay and take no page."""

    program: Program
    expected: bytes
    array: jax.Array


class JaxRunner:
    """core.Runner on one JAX device, for one rank.

    `model` is an nnx module with its weights on the device. `max_total_tokens` is the KV pool, a multiple of the page
    size, beside which one page for padding is kept. `cut`: also warm up the cut programs that launches with
    `delay_sample` or a mask need; without it such a launch is refused. `config.max_logprobs` brings them too, and those
    that give details. `script`: forced outputs, see Script. With a `speculator` decode launches are verify
    steps. `buckets`: other shapes than `config` gives.

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
        cut: bool = False,
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
        self._vocab_size = vocab_size = model.config.vocab_size
        self._eos_token_ids = tuple(model.config.eos_token_ids)
        self.max_logprobs = config.max_logprobs
        if self.max_logprobs > vocab_size:
            raise ValueError(f"max_logprobs {self.max_logprobs} is above the vocabulary of {vocab_size} ids")
        self._cut = cut or self.max_logprobs > 0
        self._script, self._poison = script, config.poison_future_map
        self._slot_range = SlotRange(self._rows)
        self._page_writes = PageWrites(self._rows, self._table_pages, self.num_pages + 1, self._poison)
        self._speculator = speculator
        self._resident: _Resident | None = None
        draft = None if speculator is None else speculator.draft
        num_locs = (self.num_pages + 1) * config.page_size
        shapes = model.cache_shapes(num_locs)
        for shape in shapes:
            if shape.shape[0] >= 1 << 31:
                raise ValueError(f"max_total_tokens {max_total_tokens}: {shape.shape[0]} cache rows are over 2**31")
        self._state = initial_state(
            shapes,
            rows=self._rows,
            pages=self._table_pages,
            vocab_size=vocab_size,
            poison=self._poison,
            script_len=script.length if script else 0,
            history_locs=num_locs if speculator else 0,
            draft_shapes=() if draft is None else draft.cache_shapes(num_locs),
            draft_hidden=speculator.hidden_shape(self._rows) if speculator else None,
        )
        self._platform = next(iter(self._state.page_table.devices())).platform
        graph, params = nnx.split(model)
        self._parameters = Parameters(model)
        self._draft_weights = () if draft is None else Parameters(draft).leaves()
        self._weights = (*self._parameters.leaves(), *self._draft_weights)
        steps = Steps(
            graph=graph,
            tree=jax.tree.structure(params),
            page_size=config.page_size,
            num_locs=num_locs,
            kernels=Kernels.choose(config.kernels, self._platform),
            poison=self._poison,
            deterministic=config.deterministic,
            speculator=speculator,
        )
        self._programs = Programs(
            steps,
            self.buckets,
            vocab_size=vocab_size,
            script_len=script.length if script else 0,
            cut=self._cut,
            max_logprobs=self.max_logprobs,
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
        self._slot_range.check(launch)
        with_details = launch.output_details or launch.input_spans is not None
        if with_details and not self.max_logprobs:
            raise ValueError(f"launch {launch.number} wants details of log-probabilities, but max_logprobs is 0")
        if self._speculator is not None and bucket.is_decode:
            return [self._verify(launch, bucket)]
        cut = launch.delay_sample or launch.mask is not None or with_details
        if cut and not self._cut:
            raise ValueError(f"launch {launch.number} needs the cut programs: make the runner with cut=True")
        program = self._programs[f"forward_{bucket.name}" if cut else bucket.name]
        page_writes = self._write_pages_ahead(launch, bucket.writes)
        self._write_adjustments(launch)
        packed = pack_step(program.layout, launch, page_writes, self._script)
        handle = Handle(launch, bucket)
        if not cut:
            sent = self._resident_or(program, packed)
            self._state, outputs = self._call(program, self._weights, self._state, sent)
            handle.send_back(outputs)
            if outputs.again is not None:
                expected = next_packed(program.layout, program.layout.fields(packed), np)
                self._resident = _Resident(program, expected.tobytes(), outputs.again)
            return [handle]
        self._state, handle.logits, hidden = self._call(program, self._weights, self._state, packed)
        logits, _ = handle.logits
        if not launch.delay_sample:
            self._sample(handle, launch.mask)
        if with_details:
            handle.details = launch_details(self._programs, self._call, self._weights, launch, bucket, logits, hidden)
        return [handle]

    def sample(self, samples: list[Sample]) -> None:
        """Masks and samples a launch that had `delay_sample`. Raises ValueError for one already sampled."""
        (late,) = samples
        if late.handle.drafts is not None:
            return self._score(late.handle, late.mask)
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
        tokens, logprobs, *more = (x[:rows] for x in unpack_outputs(fetching.fetch(outputs.fetched), drafts))
        if drafts is not None:
            accepted, lens, bonus = more
            return StepResult(tokens, accepted, lens, bonus, logprobs)
        if more:
            raise_faults(launch, more[0])
        details = (None, None) if handle.details is None else handle.details.fetch(rows)
        return StepResult(tokens, logprobs=logprobs, output_details=details[0], input_details=details[1])

    def drafts(self, handle: Handle) -> np.ndarray:
        """int32 [B, drafts] of a verify step whose scoring was delayed; blocks until they are made."""
        assert handle.drafts is not None
        return fetching.fetch(handle.drafts)[:, : len(handle.launch.slots)].T

    def is_ready(self, handle: Handle) -> bool:
        return handle.is_ready()

    def is_forward_ready(self, handle: Handle) -> bool:
        """Of a launch with `delay_sample` that waits for its sampling: whether the device has nothing left to do."""
        return handle.logits is not None and handle.logits[0].is_ready()  # type: ignore[attr-defined]

    def block(self, handle: Handle) -> None:
        """Returns once what has been launched for `handle` (the forward alone, before `sample`) is done; any thread."""
        jax.block_until_ready(handle.arrays())

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
        self._weights = (*self._parameters.leaves(), *self._draft_weights)

    def shutdown(self) -> None:
        """Waits for the device, then lets go of weights, state and programs. Twice is once."""
        leaves = jax.tree.leaves(self._state)
        jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])  # deleted: a step failed
        self._programs.close()
        self._weights = self._draft_weights = ()
        self._parameters = None  # type: ignore[assignment]
        self._resident = None
        self._state = None  # type: ignore[assignment]

    def _verify(self, launch: Launch, bucket: Bucket) -> Handle:
        if (launch.delay_sample or launch.mask is not None) and not self._cut:
            raise ValueError(f"launch {launch.number} needs the cut programs: make the runner with cut=True")
        if launch.output_details:
            raise ValueError(f"launch {launch.number} wants details of log-probabilities, but verify steps give none")
        handle = Handle(launch, bucket)
        page_writes = self._write_pages_ahead(launch, bucket.writes)
        if launch.mask is None and not launch.delay_sample:
            program = self._programs[f"verify_{bucket.rows}"]
            packed = pack_verify(program.layout, launch, page_writes)
            self._state, outputs = self._call(program, self._weights, self._state, packed)
            handle.send_back(outputs)
            return handle
        program = self._programs[f"draft_{bucket.rows}"]
        packed = pack_verify(program.layout, launch, page_writes, launch.mask)
        self._state, handle.drafts = self._call(program, self._weights, self._state, packed)
        if launch.delay_sample:
            fetching.start(handle.drafts)
        else:
            self._score(handle, launch.mask)
        return handle

    def _score(self, handle: Handle, mask: np.ndarray | None) -> None:
        drafts, handle.drafts = handle.drafts, None
        program = self._programs[f"score_{handle.bucket.rows}"]
        packed = pack_verify(program.layout, handle.launch, handle.launch.page_writes[:, :0], mask)
        self._state, outputs = self._call(program, self._weights, self._state, drafts, packed)
        handle.send_back(outputs)

    def _resident_or(self, program: Program, packed: np.ndarray) -> np.ndarray | jax.Array:
        """What is on the device already, where it equals `packed`: then nothing goes up."""
        there = self._resident
        if there is not None and there.program is program and there.expected == packed.tobytes():
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
        ahead, rest = self._page_writes.split(launch, room)
        for writes in ahead:
            self._write("write_pages", pack_pages(writes))
        return rest

    def _write_adjustments(self, launch: Launch) -> None:
        layout = self._programs["write_adjustments"].layout
        for packed in launch_adjustments(layout, launch, self._vocab_size, self._eos_token_ids):
            self._write("write_adjustments", packed)

    def _write(self, name: str, packed: np.ndarray) -> None:
        """Calls a program that changes a field of the state."""
        program = self._programs[name]
        out = self._call(program, *program.arguments(self._weights, self._state), packed)
        self._state = program.put(self._state, out)

    def _sample(self, handle: Handle, mask: np.ndarray | None) -> None:
        if handle.logits is None:
            raise ValueError(f"launch {handle.launch.number} is sampled already")
        logits, handle.logits = handle.logits, None
        program = self._programs[f"sample_{handle.bucket.rows}"]
        packed = pack_sample(program.layout, handle.launch, mask)
        self._state, outputs = self._call(program, self._state, logits, packed)
        handle.send_back(outputs)
