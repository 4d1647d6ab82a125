"""RankRunner: the launches of all data-parallel ranks, as one program a step that is spread over their devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Sample, StepResult
from jaxoverlap.device import fetching
from jaxoverlap.device.adjustments import launch_adjustments
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.launch_checks import SlotRange, raise_faults
from jaxoverlap.device.packing import pack_pages, pack_sample, pack_step, unpack_outputs
from jaxoverlap.device.page_writes import PageWrites
from jaxoverlap.device.parameters import Parameters
from jaxoverlap.device.programs import Over, Program, Programs, Progress
from jaxoverlap.device.state import initial_state
from jaxoverlap.device.step import Logits, Outputs, Steps
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.models.decoder import Decoder
from jaxoverlap.models.paged import Model
from jaxoverlap.parallel.mesh import RankMesh
from jaxoverlap.parallel.processes import Watcher


class Step:
    """One step of all ranks on its way; a rank's handle is (step, place among the local ranks)."""

    __slots__ = ("bucket", "launches", "logits", "outputs")

    def __init__(self, launches: Sequence[Launch], bucket: Bucket) -> None:
        self.launches = launches
        self.bucket = bucket
        self.logits: Logits | None = None  # until sampled
        self.outputs: Outputs | None = None

    def send_back(self, outputs: Outputs) -> None:
        self.outputs = outputs
        fetching.start(outputs.fetched)

    def array(self) -> jax.Array:
        """What has been launched last of it."""
        if self.outputs is not None:
            return self.outputs.fetched
        assert self.logits is not None
        return self.logits[0]


Handle = tuple[Step, int]


class RankRunner:
    """core.Runner for the ranks of a mesh, each with its own rows, pages and state on its own device.

    `model` is an nnx module for as many ranks (models/sharding.py) whose parameters lie on the mesh. `max_total_tokens`
    and all of `config` are of one rank. `exchange` tells the ranks' facts to each other. `cut` as for JaxRunner: where
    one rank has a grammar, the step is cut in two for all.

    Every process launches the same steps in the same order; what else is called (samplings, page tables) has no part
    in which ranks wait for each other. All calls come from one thread.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        mesh: RankMesh,
        *,
        max_total_tokens: int,
        context_length: int,
        exchange: Callable[[np.ndarray], np.ndarray],
        cut: bool = False,
    ) -> None:
        self.mesh = mesh
        self.ranks = mesh.local
        self._watcher = Watcher(mesh.local) if len(mesh.local) < mesh.size else None
        self.leave = None if self._watcher is None else self._watcher.leave
        self._exchange = exchange
        self.buckets = Buckets.of(config, context_length=context_length, max_total_tokens=max_total_tokens)
        self.num_pages = max_total_tokens // config.page_size
        self._cut = cut
        self._vocab_size = model.config.vocab_size
        self._eos_token_ids = tuple(model.config.eos_token_ids)
        rows = config.max_running_requests + 1
        pages = -(-context_length // config.page_size)
        self._slot_ranges = [SlotRange(rows) for _ in mesh.local]
        self._page_writes = PageWrites(rows, pages, self.num_pages + 1, config.poison_future_map)
        num_locs = (self.num_pages + 1) * config.page_size
        states = []
        for rank in mesh.local:
            with jax.default_device(mesh.devices[rank]):
                states.append(
                    initial_state(
                        model.cache_shapes(num_locs),
                        rows=rows,
                        pages=pages,
                        vocab_size=self._vocab_size,
                        poison=config.poison_future_map,
                        script_len=0,
                    )
                )
        self._state = jax.tree.map(lambda *shares: mesh.join(shares), *states)
        graph, params = nnx.split(model)
        self._parameters = parameters_of(model, mesh)
        self._weights = self._parameters.leaves()
        steps = Steps(
            graph=graph,
            tree=jax.tree.structure(params),
            page_size=config.page_size,
            num_locs=num_locs,
            kernels=Kernels.choose(config.kernels, mesh.devices[0].platform),
            poison=config.poison_future_map,
        )
        over = Over(mesh.mesh, tuple(w.sharding.spec for w in self._weights))  # type: ignore[attr-defined]
        self._programs = Programs(steps, self.buckets, vocab_size=self._vocab_size, cut=cut, over=over)

    @property
    def device_name(self) -> str:
        return f"{self.mesh.size} x {self.mesh.devices[0].device_kind}"

    @property
    def programs(self) -> tuple[str, ...]:
        return tuple(self._programs.table)

    @property
    def compiles(self) -> int:
        """Compiles that this runner's calls have caused."""
        return self._programs.guard.compiles

    def warm_up(self, progress: Progress | None = None) -> None:
        """As JaxRunner's; every process compiles all programs."""
        platform = self.mesh.devices[0].platform
        self._state = self._programs.warm_up(self._weights, self._state, platform, progress)

    def exchange(self, facts: np.ndarray) -> np.ndarray:
        """The facts of all ranks, int64 [ranks, len(Fact)], for those of the local ones; waits for all."""
        if self._watcher is None:
            return self._exchange(facts)
        with self._watcher.meeting():
            return self._exchange(facts)

    def launch(self, launches: list[Launch]) -> list[Handle]:
        """One launch of each local rank. If any rank anywhere extends, all run an extend program, in which rows that
        decode bring one token each; a rank without work brings padding."""
        bucket = self._bucket(launches)
        cut = launches[0].is_grammar_in_batch
        if cut and not self._cut:
            raise ValueError(f"launch {launches[0].number} needs the cut programs: make the runner with cut=True")
        for slot_range, launch in zip(self._slot_ranges, launches):
            slot_range.check(launch)
        program = self._programs[f"forward_{bucket.name}" if cut else bucket.name]
        ahead, rest = zip(*(self._page_writes.split(launch, bucket.writes) for launch in launches))
        self._write("write_pages", [[pack_pages(writes) for writes in some] for some in ahead])
        layout = self._programs["write_adjustments"].layout
        self._write(
            "write_adjustments",
            [[*launch_adjustments(layout, x, self._vocab_size, self._eos_token_ids)] for x in launches],
        )
        packed = self.mesh.put(
            [pack_step(program.layout, launch, writes, None) for launch, writes in zip(launches, rest)]
        )
        step = Step(launches, bucket)
        if cut:
            self._state, step.logits, _ = self._call(program, self._weights, self._state, packed)
            if not any(launch.delay_sample for launch in launches):
                self._sample(step, [launch.mask for launch in launches])
        else:
            self._state, outputs = self._call(program, self._weights, self._state, packed)
            step.send_back(outputs)
        return [(step, i) for i in range(len(launches))]

    def sample(self, samples: list[Sample]) -> None:
        """Masks and samples a step for all local ranks; `samples` are of those that delayed theirs."""
        step = samples[0].handle[0]
        masks = [launch.mask for launch in step.launches]
        for late in samples:
            masks[late.handle[1]] = late.mask
        self._sample(step, masks)

    def wait(self, handle: Handle) -> StepResult:
        """Blocks until the step is done. Raises RuntimeError for a launch not sampled yet, and with `poison_future_map`
        for a row that read what no step had just written for it."""
        step, i = handle
        launch = step.launches[i]
        if step.outputs is None:
            raise RuntimeError(f"launch {launch.number} is not sampled yet")
        fetched = fetching.fetch(self.mesh.share(step.outputs.fetched, i))
        tokens, logprobs, *faults = (x[: len(launch.slots)] for x in unpack_outputs(fetched, None))
        if faults:
            raise_faults(launch, faults[0])
        return StepResult(tokens, logprobs=logprobs)

    def is_ready(self, handle: Handle) -> bool:
        step, _ = handle
        return step.outputs is not None and step.outputs.fetched.is_ready()  # type: ignore[attr-defined]

    def is_forward_ready(self, handle: Handle) -> bool:
        """Of a step that waits for its sampling: whether the device has nothing left to do."""
        step, _ = handle
        return step.logits is not None and step.logits[0].is_ready()  # type: ignore[attr-defined]

    def block(self, handle: Handle) -> None:
        """Returns once what has been launched of the step is done; any thread."""
        jax.block_until_ready(handle[0].array())

    def check_weights(self, new: Mapping[str, Any]) -> None:
        """As JaxRunner's; `new` are whole parameters."""
        self._parameters.check(new)

    def update_weights(self, new: dict[str, Any]) -> None:
        """As JaxRunner's: each rank takes its share of `new`. Every process gives the same."""
        self._parameters.check(new)
        jax.block_until_ready(self._state)
        self._weights = ()  # so that nothing keeps the former ones
        self._parameters.replace(new)
        self._weights = self._parameters.leaves()

    def shutdown(self) -> None:
        """Waits for the devices, then lets go of weights, state and programs. Twice is once."""
        if self._watcher is not None:
            self._watcher.stop()
        leaves = jax.tree.leaves(self._state)
        jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])  # deleted: a step failed
        self._programs.close()
        self._weights = ()
        self._state = None

    def _bucket(self, launches: list[Launch]) -> Bucket:
        tokens = launches[0].global_num_tokens
        if tokens is None:
            raise ValueError(f"launch {launches[0].number} has no global_num_tokens: the ranks have not met")
        if not launches[0].is_extend_in_batch:
            return self.buckets.for_decode(max(tokens))
        return self.buckets.for_extend(max(tokens), max(len(launch.slots) for launch in launches))

    def _write(self, name: str, packed: Sequence[Sequence[np.ndarray]]) -> None:
        """Calls a program that changes a field of the state as often as the rank with the most to write needs."""
        program = self._programs[name]
        for n in range(max(map(len, packed))):
            arrays = [some[n] if n < len(some) else program.layout.empty()[0] for some in packed]
            out = self._call(program, *program.arguments(self._weights, self._state), self.mesh.put(arrays))
            self._state = program.put(self._state, out)

    def _sample(self, step: Step, masks: Sequence[np.ndarray | None]) -> None:
        if step.logits is None:
            raise ValueError(f"launch {step.launches[0].number} is sampled already")
        logits, step.logits = step.logits, None
        program = self._programs[f"sample_{step.bucket.rows}"]
        packed = self.mesh.put([pack_sample(program.layout, x, mask) for x, mask in zip(step.launches, masks)])
        self._state, outputs = self._call(program, self._state, logits, packed)
        step.send_back(outputs)

    def _call(self, program: Program, *args: Any) -> Any:
        return self._programs.call(program, *args)


def parameters_of(model: Any, mesh: RankMesh) -> Parameters:
    if not isinstance(model, Decoder):
        return Parameters(model)
    whole = nnx.eval_shape(lambda: Decoder(model.config))
    return Parameters(model, named_leaves(whole), mesh.placing(whole))
