"""A device that only keeps time: steps take as long as the configuration says, tokens come from the checksum rule.

For scheduling studies and for measuring the host, without a model. Imports no jax.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import ForwardMode, Launch, Sample, StepResult
from jaxoverlap.sampling_params import SamplingParams

DEFAULT_STEP_MS = 8.0
DEFAULT_CONTEXT = 4096  # tokens
VOCAB, EOS = 1000, 2
START, FACTOR, PERIOD, MODULUS, SPAN, OFFSET = 7, 31, 13, 1_000_003, 900, 10  # the rule of models/checksum.py
SPIN = 3e-4  # seconds before a deadline from which on a wait polls the clock: a sleep may end that late


@dataclass(frozen=True, slots=True)
class SimulatedModelConfig:
    vocab_size: int = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Stands where a loaded model would: the checksum rule, no tokenizer."""

    context_length: int
    name: str = "checksum"
    config: SimulatedModelConfig = SimulatedModelConfig()
    tokenizer: None = None

    @property
    def sampling_defaults(self) -> dict[str, object]:
        return {}


class Handle:
    """A step on its way; times are `time.perf_counter`."""

    __slots__ = ("begin", "end", "error", "forward_end", "hashes", "launch", "result", "sampled")

    def __init__(self, launch: Launch, begin: float, end: float) -> None:
        self.launch = launch
        self.begin = begin
        self.end = self.forward_end = end
        self.sampled = not launch.delay_sample
        self.hashes: np.ndarray | None = None  # int64 [B], until sampled
        self.result: StepResult | None = None
        self.error: RuntimeError | None = None


class SimulatedRunner:
    """core.Runner whose steps run one after the other, each from its launch or the end of the step before, whichever
    is later. `launch` returns at once; `wait` sleeps, without the GIL but for the last fraction of a millisecond.

    Tokens are worked out when a step is waited for, in launch order, from its launch's arrays and its pages: a
    wrong page, or an array rewritten meanwhile, gives wrong tokens. All calls but `block` come from one thread.
    """

    def __init__(self, config: EngineConfig, *, max_total_tokens: int, context_length: int) -> None:
        step_ms = DEFAULT_STEP_MS if config.step_ms is None else config.step_ms
        prefill_ms = step_ms if config.prefill_step_ms is None else config.prefill_step_ms
        self.device_name = f"simulated device, {step_ms:g} ms a step"
        self.num_pages = max_total_tokens // config.page_size
        self._page_size = config.page_size
        self._decode_s, self._prefill_s = step_ms / 1e3, prefill_ms / 1e3
        self._jitter = config.step_jitter or 0.0
        self._noise = np.random.default_rng(config.random_seed)
        rows = config.max_running_requests + 1
        self._page_table = np.zeros((rows, -(-context_length // config.page_size) + 1), np.int32)
        self._hashes = np.full((self.num_pages + 1) * config.page_size, -1, np.int64)  # of all tokens up to this place
        self._relay = np.full(rows, -1, np.int32)
        self._power, self._inverse = _powers(context_length + 1)
        self._queue: deque[Handle] = deque()
        self.free_at = 0.0  # when the device will have done all that was launched

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError naming a parameter that changes logits: there are none."""
        for name in params.adjustments:
            raise ValueError(f"{name} means nothing on a device without logits")

    def launch(self, launches: list[Launch]) -> list[Handle]:
        (launch,) = launches
        begin = max(time.perf_counter(), self.free_at)
        return [self.put(launch, begin, begin + self.step_seconds(launch.mode.is_extend))]

    def step_seconds(self, extends: bool) -> float:
        """Of the next step."""
        seconds = self._prefill_s if extends else self._decode_s
        return seconds * self._noise.uniform(1 - self._jitter, 1 + self._jitter) if self._jitter else seconds

    def put(self, launch: Launch, begin: float, end: float) -> Handle:
        """Launches a step of a set time (`time.perf_counter`)."""
        handle = Handle(launch, begin, end)
        self.free_at = end
        self._queue.append(handle)
        return handle

    def sample(self, samples: list[Sample]) -> None:
        """Sampling takes no time of its own, but the device stands still until it is asked for."""
        for x in samples:
            handle = x.handle
            if handle.sampled:
                raise ValueError(f"launch {x.launch.number} is sampled already")
            self._run_until(handle)
            handle.end = max(handle.end, time.perf_counter())
            self.free_at = max(self.free_at, handle.end)
            handle.sampled = True
            self._pick(handle, x.mask)

    def wait(self, handle: Handle) -> StepResult:
        if not handle.sampled:
            raise ValueError(f"launch {handle.launch.number} waits for its sampling")
        self._run_until(handle)
        self.block(handle)
        if handle.error is not None:
            raise handle.error
        assert handle.result is not None
        return handle.result

    def block(self, handle: Handle) -> None:
        """Until the step is done; may be called from any thread."""
        clock, end = time.perf_counter, handle.end
        left = end - clock()
        if left > SPIN:
            time.sleep(left - SPIN)
        while clock() < end:
            pass

    def is_ready(self, handle: Handle) -> bool:
        return handle.sampled and time.perf_counter() >= handle.end

    def device_spans(self, handle: Handle) -> list[tuple[str, float, float]]:
        """(kind, begin, end) of what the device does for the launch: a "step", or a "forward" and its "sample"."""
        if not handle.launch.delay_sample:
            return [("step", handle.begin, handle.end)]
        return [("forward", handle.begin, handle.forward_end), ("sample", handle.end, handle.end)]

    def shutdown(self) -> None:
        """Nothing to give back."""

    def _run_until(self, handle: Handle) -> None:
        """Works out what the steps up to this one do, in launch order."""
        queue = self._queue
        while queue and handle.hashes is None and handle.result is None and handle.error is None:
            self._run(queue.popleft())

    def _run(self, handle: Handle) -> None:
        launch = handle.launch
        slots, index, pages = launch.page_writes.astype(np.intp)
        self._page_table[slots, index] = pages
        if launch.mode is ForwardMode.IDLE:
            handle.result = StepResult(np.empty(0, np.int32))
            return
        hashes = self._decode(launch) if launch.mode.is_decode else self._extend(launch)
        if hashes.min() < 0:
            handle.error = RuntimeError(f"launch {launch.number}: a row read a position that no step had written")
            return
        handle.hashes = hashes
        if handle.sampled:
            self._pick(handle, launch.mask)

    def _decode(self, launch: Launch) -> np.ndarray:
        """int64 [decode rows]: the hash of each row's context with its newest token, which is stored there."""
        first = launch.num_prefill
        slots, at = launch.slots[first:], launch.seq_lens[first:] - 1
        known = self._hashes[self._locations(slots, at - 1)]
        grown = (known * FACTOR + (self._relay[slots] + 1) * (at % PERIOD + 1)) % MODULUS
        grown[known < 0] = -1
        self._hashes[self._locations(slots, at)] = grown
        return grown

    def _extend(self, launch: Launch) -> np.ndarray:
        """int64 [B], prefill rows first; a row's chunk goes on from the hash of what is cached before it."""
        assert launch.prefix_lens is not None
        assert launch.extend_lens is not None
        assert launch.input_ids is not None
        out, start = np.empty(len(launch.slots), np.int64), 0
        for i in range(launch.num_prefill):
            slot, prefix, count = launch.slots[i], int(launch.prefix_lens[i]), int(launch.extend_lens[i])
            before = int(self._hashes[self._locations(slot, prefix - 1)]) if prefix else START
            places = np.arange(prefix, prefix + count)
            terms = (launch.input_ids[start : start + count] + 1).astype(np.int64) * (places % PERIOD + 1)
            # h_k = 31^k (h_0 + sum over j <= k of terms_j 31^-j), all modulo a prime
            sums = np.cumsum(terms * self._inverse[1 : count + 1] % MODULUS) + before
            hashes = self._power[1 : count + 1] * (sums % MODULUS) % MODULUS
            self._hashes[self._locations(slot, places)] = hashes
            out[i] = hashes[-1] if before >= 0 else -1
            start += count
        if launch.num_decoding:
            out[launch.num_prefill :] = self._decode(launch)
        return out

    def _locations(self, slots: np.ndarray, at: np.ndarray | int) -> np.ndarray:
        page = self._page_size
        if page == 1:
            return self._page_table[slots, at]
        return self._page_table[slots, at // page] * page + at % page

    def _pick(self, handle: Handle, mask: np.ndarray | None) -> None:
        """The rule's token of each row; under a mask the nearest allowed id upwards (cyclic)."""
        if handle.hashes is None:
            return
        tokens = (OFFSET + handle.hashes % SPAN).astype(np.int32)
        if mask is not None:
            for i, row in enumerate(mask[:, 0]):
                allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB])
                if len(allowed):
                    tokens[i] = allowed[np.argmin((allowed - tokens[i]) % VOCAB)]
        self._relay[handle.launch.slots] = tokens
        logprobs = np.zeros(len(tokens), np.float32) if handle.launch.return_logprob else None
        handle.result, handle.hashes = StepResult(tokens, logprobs=logprobs), None


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [count] each: FACTOR**k and its inverse, modulo MODULUS."""
    power, inverse = np.ones(count, np.int64), np.ones(count, np.int64)
    back = pow(FACTOR, -1, MODULUS)
    for k in range(1, count):
        power[k] = power[k - 1] * FACTOR % MODULUS
        inverse[k] = inverse[k - 1] * back % MODULUS
    return power, inverse


class SimulatedRanks:
    """core.Runner of as many simulated devices as there are ranks, whose steps begin and end together: as long as a
    prefill where any rank extends."""

    def __init__(self, config: EngineConfig, *, max_total_tokens: int, context_length: int) -> None:
        sizes = {"max_total_tokens": max_total_tokens, "context_length": context_length}
        self.ranks = range(config.dp_size)
        self._runners = [SimulatedRunner(config, **sizes) for _ in self.ranks]
        self.device_name = f"{config.dp_size} x {self._runners[0].device_name}"
        self.check_params = self._runners[0].check_params

    @property
    def free_at(self) -> float:
        """When the devices will have done all that was launched."""
        return max(r.free_at for r in self._runners)

    def launch(self, launches: list[Launch]) -> list[tuple[int, Handle]]:
        begin = max(time.perf_counter(), self.free_at)
        end = begin + self._runners[0].step_seconds(launches[0].is_extend_in_batch)
        return [(i, self._runners[i].put(launch, begin, end)) for i, launch in enumerate(launches)]

    def sample(self, samples: list[Sample]) -> None:
        for x in samples:
            i, handle = x.handle
            self._runners[i].sample([Sample(x.launch, handle, x.mask)])

    def wait(self, handle: tuple[int, Handle]) -> StepResult:
        i, own = handle
        return self._runners[i].wait(own)

    def block(self, handle: tuple[int, Handle]) -> None:
        self._runners[handle[0]].block(handle[1])

    def is_ready(self, handle: tuple[int, Handle]) -> bool:
        return self._runners[handle[0]].is_ready(handle[1])

    def device_spans(self, handle: tuple[int, Handle]) -> list[tuple[str, float, float]]:
        return self._runners[handle[0]].device_spans(handle[1])

    def shutdown(self) -> None:
        """Nothing to give back."""


def simulate(config: EngineConfig) -> tuple[SimulatedModel, SimulatedRunner | SimulatedRanks, int]:
    """(model, runner, KV pool in tokens): by default a pool that holds every slot at full length."""
    model = SimulatedModel(context_length=config.context_length or DEFAULT_CONTEXT)
    page = config.page_size
    total = config.max_total_tokens or config.max_running_requests * -(-model.context_length // page) * page
    kind = SimulatedRunner if config.dp_size == 1 else SimulatedRanks
    return model, kind(config, max_total_tokens=total, context_length=model.context_length), total
