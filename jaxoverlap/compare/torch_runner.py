"""TorchRunner: the same launches in PyTorch, overlapped as SGLang does it.

On CUDA the host only enqueues. A launch goes up on the schedule stream through pinned memory; the forward stream waits
for that, runs the step (a CUDA graph for decode, after `warm_up`), samples, stashes the tokens in the FutureMap and
starts their copy back; the host waits for the event behind that copy when the result is wanted. On CPU PyTorch computes
inside the call, so nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jaxoverlap.compare.torch_graphs import DecodeGraphs
from jaxoverlap.compare.torch_paged import PagedContext, Span, TorchModel, locations
from jaxoverlap.compare.torch_sample import RowParams, sample
from jaxoverlap.compare.torch_streams import CpuStreams, CudaStreams, Download, Streams
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Request, Sample, StepResult
from jaxoverlap.device.buckets import decode_rows
from jaxoverlap.device.launch_checks import check_range
from jaxoverlap.device.layout import Layout
from jaxoverlap.progress import Report
from jaxoverlap.sampling_params import GREEDY_TEMPERATURE, SamplingParams

FLOATS = TEMPERATURE, TOP_P, MIN_P = range(3)
INTS = TOP_K, SEED = range(2)
NOT_DONE = ("deterministic", "max_logprobs", "poison_future_map")  # settings
NOT_SAMPLED = {  # sampling parameters, and what leaves them off
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
}
Force = Callable[[Request, int], int]
"""(request, output index) -> the token that is forced there, -1 for none."""


class Handle:
    """A step on its way; opaque to callers. It keeps what the step reads alive until its result is fetched, as SGLang's
    ring of batches does."""

    __slots__ = ("download", "fields", "launch", "logits", "params")

    def __init__(self, launch: Launch, fields: dict[str, Tensor], params: RowParams) -> None:
        self.launch = launch
        self.fields = fields
        self.params = params
        self.logits: Tensor | None = None  # until sampled
        self.download: Download | None = None


class TorchRunner:
    """core.Runner in PyTorch, on the CPU or one CUDA device, for one rank.

    `max_total_tokens` is the KV pool, a multiple of the page size, beside which one page for padding is kept. `force`:
    forced outputs, for replay. Penalties, min_new_tokens, logit_bias and details of log-probabilities are refused.

    All calls come from one thread. Raises ValueError naming a setting that it does not enforce, or a length.
    """

    def __init__(
        self,
        model: TorchModel,
        config: EngineConfig,
        *,
        max_total_tokens: int,
        context_length: int,
        device: str = "cpu",
        force: Force | None = None,
    ) -> None:
        check_settings(config)
        if max_total_tokens % config.page_size:
            raise ValueError(f"max_total_tokens {max_total_tokens} must be a multiple of page_size {config.page_size}")
        place = torch.device(device)
        self._streams: Streams = CpuStreams() if place.type == "cpu" else CudaStreams(place)
        self.is_synchronous = place.type == "cpu"  # a launch returns when its step is done
        self._model = model
        self._force = force
        self._page_size = config.page_size
        self._vocab_size: int = model.config.vocab_size
        self.num_pages = max_total_tokens // config.page_size
        self._num_locs = (self.num_pages + 1) * config.page_size
        rows = config.max_running_requests + 1
        pages = -(-(context_length + 2 * config.verify_reserve) // config.page_size)
        self._page_limits = rows, pages, self.num_pages + 1
        self._cache = model.cache(self._num_locs, place)
        self._output_tokens = torch.zeros(rows, dtype=torch.int64, device=place)  # the FutureMap
        self._page_table = torch.zeros(rows, pages, dtype=torch.int64, device=place)
        self._floats = np.zeros((len(FLOATS), rows), np.float32)
        self._ints = np.zeros((len(INTS), rows), np.int32)
        self._graphs: DecodeGraphs | None = None
        if place.type == "cuda":
            shapes = decode_rows(config.max_running_requests)
            self._graphs = DecodeGraphs(self._decode, shapes, pages * config.page_size, place)

    @property
    def device_name(self) -> str:
        place = self._streams.device
        name = "cpu" if place.type == "cpu" else torch.cuda.get_device_name(place)
        return f"{name} (PyTorch {torch.__version__})"

    @torch.inference_mode()
    def warm_up(self, progress: Report | None = None) -> None:
        """Captures the CUDA graphs, where there are any."""
        if self._graphs is not None:
            with self._streams.forward():
                self._graphs.capture(progress)

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError naming a parameter that this runner does not enforce."""
        for name, off in NOT_SAMPLED.items():
            if (getattr(params, name) or off) != off:
                raise ValueError(f"{name} is not enforced in PyTorch: leave it at {off!r}")

    @torch.inference_mode()
    def launch(self, launches: list[Launch]) -> list[Handle]:
        """One launch, one rank. Raises ValueError for a launch that names slots or pages out of range, or wants what
        is refused."""
        (launch,) = launches
        self._check(launch)
        self._keep_params(launch)
        self._streams.read_barrier()
        handle = self._upload(launch)
        if not len(launch.slots):
            handle.logits = torch.empty(0, self._vocab_size, device=self._streams.device)
        with self._streams.forward():
            if handle.logits is None:
                handle.logits = self._forward(handle)
            if not launch.delay_sample:
                self._sample(handle, launch.mask)
        return [handle]

    @torch.inference_mode()
    def sample(self, samples: list[Sample]) -> None:
        """Masks and samples a launch that had `delay_sample`. Raises ValueError for one already sampled."""
        (late,) = samples
        if late.handle.logits is None:
            raise ValueError(f"launch {late.launch.number} is sampled already")
        with self._streams.forward():
            self._sample(late.handle, late.mask)

    def wait(self, handle: Handle) -> StepResult:
        """Blocks until the step is done. Raises RuntimeError for a launch not sampled yet."""
        if handle.download is None:
            raise RuntimeError(f"launch {handle.launch.number} is not sampled yet")
        tokens, logprobs = handle.download.wait()
        return StepResult(tokens, logprobs=logprobs.view(np.float32))

    def is_ready(self, handle: Handle) -> bool:
        return handle.download is not None and handle.download.is_ready()

    def shutdown(self) -> None:
        """Waits for the device, then lets go of weights and state."""
        if self._graphs is not None:
            torch.cuda.synchronize(self._streams.device)
        self._graphs = None
        self._model = None  # type: ignore[assignment]
        self._cache = ()

    def _check(self, launch: Launch) -> None:
        if launch.output_details or launch.input_spans is not None:
            raise ValueError(f"launch {launch.number} wants details of log-probabilities, which PyTorch does not give")
        check_range(launch, "slot", launch.slots, self._page_limits[0])
        for name, values, limit in zip(("slot", "index", "page"), launch.page_writes, self._page_limits):
            check_range(launch, f"page_writes: {name}", values, limit)

    def _keep_params(self, launch: Launch) -> None:
        for slot, request in zip(launch.slots.tolist(), launch.requests[: launch.num_prefill]):
            p = request.params
            self._floats[:, slot] = p.temperature, p.top_p, p.min_p
            self._ints[:, slot] = min(p.top_k, np.iinfo(np.int32).max), np.uint32(request.seed).view(np.int32)

    def _upload(self, launch: Launch) -> Handle:
        """One int32 array goes up; the page table takes its entries."""
        rows, ids = len(launch.slots), () if launch.input_ids is None else launch.input_ids
        floats, ints = self._floats[:, launch.slots], self._ints[:, launch.slots]
        layout = Layout(
            slots=(rows,),
            seq_lens=(rows,),
            last_tokens=(rows,),
            floats=floats.shape,
            ints=ints.shape,
            forced=(rows,),
            ids=(len(ids),),
            page_writes=launch.page_writes.shape,
        )
        packed, f = layout.empty()
        f["slots"][:], f["seq_lens"][:], f["ids"][:] = launch.slots, launch.seq_lens, ids
        lens = np.ones(rows, np.int32) if launch.extend_lens is None else launch.extend_lens
        f["last_tokens"][:] = np.cumsum(lens) - 1
        f["floats"][:], f["ints"][:], f["page_writes"][:] = floats.view(np.int32), ints, launch.page_writes
        if self._force is not None:
            places = zip(launch.requests, launch.seq_lens.tolist())
            f["forced"][:] = [self._force(r, n - r.prompt_len) for r, n in places]
        fields = layout.fields(self._streams.upload(packed))
        slots, index, pages = fields["page_writes"].long()
        self._page_table[slots, index] = pages
        temperature, top_p, min_p = fields["floats"].view(torch.float32)
        top_k, seed = fields["ints"]
        greedy = (floats[TEMPERATURE] < GREEDY_TEMPERATURE) | (ints[TOP_K] == 1)
        limited = (floats[TOP_P] < 1) | (floats[MIN_P] > 0) | (ints[TOP_K] > 0)
        hints = bool(greedy.all()), bool((limited & ~greedy).any())
        return Handle(launch, fields, RowParams(temperature, top_p, min_p, top_k, seed, *hints))

    def _forward(self, handle: Handle) -> Tensor:
        """float32 [B, V]. Decode rows take their input from the FutureMap."""
        launch, fields = handle.launch, handle.fields
        slots, seq_lens = fields["slots"].long(), fields["seq_lens"].long()
        prefills, longest = launch.num_prefill, int(launch.seq_lens.max())
        if prefills == 0:
            if self._graphs is not None and self._graphs.captured:
                return self._graphs.replay(slots, seq_lens, longest)
            return self._decode(slots, seq_lens, longest)
        assert launch.prefix_lens is not None
        ids, spans = [fields["ids"].long()], []
        for i, (prefix, end) in enumerate(zip(launch.prefix_lens[:prefills].tolist(), launch.seq_lens.tolist())):
            positions = torch.arange(prefix, end, device=self._streams.device)[None]
            spans.append(Span(positions, self._locations(slots[i : i + 1], end)))
        if launch.num_decoding:
            ids.append(self._output_tokens[slots[prefills:]])
            spans.append(self._decode_span(slots[prefills:], seq_lens[prefills:], longest))
        hidden = self._model(torch.cat(ids), PagedContext(spans, self._num_locs), self._cache)
        return self._model.logits(hidden[fields["last_tokens"].long()])

    def _decode(self, slots: Tensor, seq_lens: Tensor, longest: int) -> Tensor:
        """int64 [B] each -> float32 [B, V]; `longest` is at least the largest of `seq_lens`."""
        context = PagedContext([self._decode_span(slots, seq_lens, longest)], self._num_locs)
        return self._model.logits(self._model(self._output_tokens[slots], context, self._cache))

    def _decode_span(self, slots: Tensor, seq_lens: Tensor, longest: int) -> Span:
        return Span(seq_lens[:, None] - 1, self._locations(slots, longest))

    def _locations(self, slots: Tensor, length: int) -> Tensor:
        return locations(self._page_table, slots, self._page_size, length)

    def _sample(self, handle: Handle, mask: np.ndarray | None) -> None:
        """`mask` int32 [B, 1, words]; None allows everything."""
        assert handle.logits is not None
        logits, handle.logits = handle.logits, None
        fields = handle.fields
        words = None if mask is None else self._streams.upload(np.ascontiguousarray(mask[:, 0]))
        forced = None if self._force is None else fields["forced"]
        tokens, logprobs = sample(logits, handle.params, fields["seq_lens"], words, forced)
        self._output_tokens[fields["slots"].long()] = tokens
        handle.download = self._streams.download(torch.stack([tokens.int(), logprobs.view(torch.int32)]))


def check_settings(config: EngineConfig) -> None:
    """Raises ValueError naming a setting that TorchRunner does not enforce."""
    for name in NOT_DONE:
        if getattr(config, name):
            raise ValueError(f"{name} is not enforced in PyTorch: leave it at its default")


def default_device() -> str:
    """Where JAX computes, PyTorch does: "cuda" or "cpu". Raises ValueError where it cannot."""
    import jax

    if jax.default_backend() == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise ValueError(f"JAX runs on {jax.default_backend()}, but this PyTorch finds no CUDA device")
    return "cuda"
