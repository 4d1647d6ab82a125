"""Requests that decode together for a given number of turns, in a loop that a bench turns by itself. Imports no jax."""

from __future__ import annotations

import numpy as np

from jaxoverlap.calls import Call, Ticket
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Request
from jaxoverlap.driver import Driver
from jaxoverlap.loop import Loop
from jaxoverlap.parallel.group import group_of
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler import Scheduler

EOS = 2


class Load:
    """`count` streaming requests on each rank, with random prompts of `prompt_len` ids from 3 on, greedy,
    `max_new_tokens` each. They look for an end-of-sequence id unless `ignore_eos`. The KV pool is
    `config.max_total_tokens`."""

    def __init__(
        self,
        config: EngineConfig,
        driver: Driver,
        *,
        context_length: int,
        vocab_size: int,
        count: int,
        prompt_len: int,
        max_new_tokens: int,
        ignore_eos: bool,
    ) -> None:
        assert config.max_total_tokens is not None
        total = config.max_total_tokens
        schedulers = [
            Scheduler(config, max_total_tokens=total, context_length=context_length, vocab_size=vocab_size)
            for _ in range(config.dp_size)
        ]
        self.scheduler = schedulers[0]
        self.loop, self.call = Loop(group_of(config, schedulers), driver), Call()
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos)
        rng = np.random.default_rng(0)
        for i in range(count * config.dp_size):
            ids = rng.integers(3, vocab_size, prompt_len).astype(np.int32)
            stops = () if ignore_eos else (EOS,)
            request = Request(rid=f"r{i}", prompt_ids=ids, params=params, stream=True, stop_ids=stops)
            request.data_parallel_rank = i // count
            self.call.tickets.append(Ticket(request, None, self.call, i))
        self.loop.submit(self.call)

    def turn(self, turns: int) -> None:
        counters = self.scheduler.counters
        end = counters.turns + turns
        self.loop.drive(lambda: counters.turns >= end)

    def turn_until_decoding(self, batch: int) -> None:
        """Until `batch` requests run and nobody is in the middle of a prompt. Raises RuntimeError where that never
        comes."""
        s = self.scheduler
        for _ in range(1000):
            self.turn(1)
            if len(s.running_batch) == batch and s.running_batch.mode.is_decode and s.chunked is None:
                return
        raise RuntimeError(f"{len(s.running_batch)} requests decode, not {batch}: {len(s.waiting)} wait")
