"""A hand-written driver: launches built one by one, no scheduler. Pages are handed out in a scrambled order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import ForwardMode, Launch, Request
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.models.checksum import ChecksumConfig, ChecksumModel
from jaxoverlap.sampling_params import SamplingParams

CONTEXT = 96
NO_WRITES = np.zeros((3, 0), np.int32)


def make_runner(model=None, *, total=384, context=CONTEXT, cut=False, script=None, **config):
    settings = {"model_path": "checksum", "max_running_requests": 4, "chunked_prefill_size": 32, **config}
    return JaxRunner(
        model or ChecksumModel(),
        EngineConfig(**settings),
        max_total_tokens=total,
        context_length=context,
        cut=cut,
        script=script,
    )


def make_request(prompt, rid="r", seed=0, **params):
    params.setdefault("temperature", 0.0)
    return Request(
        rid=rid,
        prompt_ids=np.asarray(prompt, np.int32),
        params=SamplingParams(**params),
        seed=seed,
        return_logprob=True,
    )


class Driver:
    """Keeps slots and pages, builds launches, and follows each request's tokens as results come."""

    def __init__(self, runner, page_size=1, seed=0):
        self.runner = runner
        self.page_size = page_size
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, runner.num_pages + 1)))
        self.pages: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.number = 0
        self.writes: list[tuple[int, int, int]] = []

    def start(self, slot, request):
        self.requests[slot], self.pages[slot], self.lens[slot] = request, [], 0
        self.outputs[slot], self.logprobs[slot] = [], []

    def stop(self, slot):
        self.free += self.pages.pop(slot)
        return self.outputs[slot]

    def grow(self, slot, tokens):
        self.lens[slot] += tokens
        while len(self.pages[slot]) * self.page_size < self.lens[slot]:
            page = int(self.free.pop(0))
            self.writes.append((slot, len(self.pages[slot]), page))
            self.pages[slot].append(page)

    def launch(self, prefill=(), decode=(), **fields):
        """prefill: (slot, tokens of the chunk); decode: slots. -> (launch, handle, slots whose token counts)."""
        prefix = [self.lens[s] for s, _ in prefill]
        for slot, n in prefill:
            self.grow(slot, n)
        for slot in decode:
            prefix.append(self.lens[slot])
            self.grow(slot, 1)
        slots = [s for s, _ in prefill] + list(decode)
        ids = [self.known(s)[p : p + n] for (s, n), p in zip(prefill, prefix)]
        mode = ForwardMode.DECODE
        if prefill:
            mode = ForwardMode.MIXED if decode else ForwardMode.EXTEND
        elif not decode:
            mode = ForwardMode.IDLE
        self.number += 1
        writes, self.writes = self.writes, []
        launch = Launch(
            number=self.number,
            mode=mode,
            requests=tuple(self.requests[s] for s in slots),
            slots=np.array(slots, np.intp),
            epochs=np.zeros(len(slots), np.int64),
            seq_lens=np.array([self.lens[s] for s in slots], np.intp),
            extend_lens=np.array([n for _, n in prefill] + [1] * len(decode), np.intp) if prefill else None,
            prefix_lens=np.array(prefix, np.intp) if prefill else None,
            input_ids=np.concatenate(ids).astype(np.int32) if prefill else None,
            num_decoding=len(decode) if prefill else 0,
            page_writes=np.array(writes, np.int32).T if writes else NO_WRITES,
            **fields,
        )
        counted = [s for s in slots if self.lens[s] >= len(self.requests[s].prompt_ids)]
        (handle,) = self.runner.launch([launch])
        return launch, handle, counted

    def known(self, slot):
        return [int(t) for t in self.requests[slot].prompt_ids] + self.outputs[slot]

    def take(self, launched):
        """Waits for a launch and appends its tokens."""
        launch, handle, counted = launched
        result = self.runner.wait(handle)
        for row, slot in enumerate(launch.slots):
            if slot in counted:
                self.outputs[slot].append(int(result.tokens[row]))
                self.logprobs[slot].append(float(result.logprobs[row]))
        return result

    def run(self, prefill=(), decode=(), **fields):
        return self.take(self.launch(prefill, decode, **fields))


class ConstantModel(nnx.Module):
    """The same logits for every row, whatever was read."""

    def __init__(self, logits):
        self.row = nnx.Param(jnp.asarray(logits, jnp.float32))
        self.config = ChecksumConfig(vocab_size=len(logits), span=1, offset=0)

    def cache_shapes(self, num_locs):
        return (jax.ShapeDtypeStruct((num_locs,), jnp.int32),)

    def __call__(self, ids, context, cache):
        return ids[:, None], (cache[0].at[context.token_locs].set(ids),)

    def logits(self, hidden):
        return jnp.broadcast_to(self.row[...], (hidden.shape[0], self.config.vocab_size))


class SlowModel(ChecksumModel):
    """The checksum model behind some tens of milliseconds of matrix products."""

    def __init__(self, turns):
        super().__init__()
        self.turns = turns
        self.matrix = nnx.Param(jnp.eye(512) * 0.5)

    def __call__(self, ids, context, cache):
        w = self.matrix[...]
        burnt = jax.lax.fori_loop(0, self.turns, lambda _, x: x @ w + x, jnp.ones((512, 512)) + ids[0])
        zero = (burnt[0, 0] * 0.0).astype(jnp.int32)
        return super().__call__(ids + zero, context, cache)
