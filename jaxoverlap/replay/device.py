"""Scenarios on the JAX runner: one padded shape for all of them, so that a hundred files cost one start.

The device runs with pages of one token, and a scenario's pages are spelled out token by token; DP ranks are ranges of
slots and locations of one state. Plain and speculative scenarios have a runner each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Request, Runner, Sample, StepResult
from jaxoverlap.device.buckets import Bucket, Buckets, largest_extend
from jaxoverlap.device.runner import JaxRunner, Progress
from jaxoverlap.device.state import Script, State
from jaxoverlap.device.verify import Speculator, VerifyStep, Weights
from jaxoverlap.models.checksum import ChecksumModel
from jaxoverlap.replay.scenario import Scenario

WRONG = -1  # a draft that no token equals


class ToySpeculator(Speculator):
    """The scenarios' speculation: on a context c and its next token b it accepts 1 + (h(c + [b]) // span) % drafts
    tokens of the model's own continuation, h being the checksum model's hash."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def propose(self, step: VerifyStep, weights: Weights, state: State) -> tuple[jax.Array, State]:
        ids, cache, drafts = step.bonus, state.cache, []
        accepted = jnp.ones_like(ids)
        for ahead in range(self.num_draft_tokens - 1):
            hidden, cache = step.model(ids, step.context(state, 1, ahead), cache)
            if ahead == 0:
                accepted = 1 + hidden[:, 0] // step.model.config.span % self.num_draft_tokens
            ids, _ = step.pick(state, step.model.logits(hidden), ahead)
            drafts.append(jnp.where(ahead + 1 < accepted, ids, WRONG))
        return jnp.stack(drafts), dataclasses.replace(state, cache=cache)


class ReplayDevice:
    """Runners whose shapes hold every one of `scenarios`; `runner` is a RunnerFactory for play()."""

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        configs = [s.engine_config(overlap=True) for s in scenarios]
        self.slots = max(c.max_running_requests for c in configs)
        self.locations = max(pool_tokens(c) for c in configs)
        self.ranks = max(c.dp_size for c in configs)
        self.context_length = max(longest_context(s, c) for s, c in zip(scenarios, configs))
        self.tokens = max(
            largest_extend(c, context_length=self.context_length, max_total_tokens=pool_tokens(c)) for c in configs
        )
        self.script_length = max((i + 1 for s in scenarios for force in s.force.values() for i in force), default=1)
        self.drafts = sorted({c.speculative_num_draft_tokens for c in configs})
        self.force: dict[str, dict[int, int]] = {}
        self._runners = {drafts: self._make_runner(drafts) for drafts in self.drafts}

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles all programs of all runners; from then on none compiles. `progress` as in JaxRunner.warm_up."""
        total, before = sum(len(r.programs) for r in self._runners.values()), 0
        for runner in self._runners.values():
            runner.warm_up(None if progress is None else functools.partial(_shifted, progress, before, total))
            before += len(runner.programs)

    @property
    def compiles(self) -> int:
        return sum(r.compiles for r in self._runners.values())

    def runner(self, config: EngineConfig, scenario: Scenario, rank: int) -> Runner:
        """Scenarios are played one at a time: the forced tokens are those of the last one asked for."""
        self.force = scenario.force
        runner = self._runners[config.speculative_num_draft_tokens]
        return RankRunner(runner, config.page_size, rank * self.slots, rank * self.locations)

    def shutdown(self) -> None:
        for runner in self._runners.values():
            runner.shutdown()

    def _make_runner(self, drafts: int) -> JaxRunner:
        config = EngineConfig(
            model_path="checksum",
            max_running_requests=self.ranks * self.slots,
            max_total_tokens=self.ranks * self.locations,
            speculative_algorithm="EAGLE" if drafts else "none",
            speculative_num_draft_tokens=drafts,
        )
        decode = Bucket(self.slots, self.slots, self.slots * max(1, 2 * drafts), is_decode=True)
        extend = Bucket(self.tokens, self.slots, self.tokens + self.slots, is_decode=False)
        return JaxRunner(
            ChecksumModel(),
            config,
            max_total_tokens=self.ranks * self.locations,
            context_length=self.context_length,
            cut=True,
            script=Script(self.script_length, self._forced),
            speculator=ToySpeculator(drafts) if drafts else None,
            buckets=Buckets((decode,), (extend,)),
        )

    def _forced(self, request: Request) -> list[int] | None:
        force = self.force.get(request.rid)
        return None if force is None else [force.get(i, -1) for i in range(self.script_length)]


class RankRunner:
    """A rank's range of a shared runner; pages of `page_size` tokens become locations behind `first_location`."""

    def __init__(self, runner: JaxRunner, page_size: int, first_slot: int, first_location: int) -> None:
        self.runner = runner
        self.page_size = page_size
        self.first_slot = first_slot
        self.first_location = first_location

    def launch(self, launches: list[Launch]) -> list[Any]:
        return self.runner.launch([self._placed(x) for x in launches])

    def sample(self, samples: list[Sample]) -> None:
        self.runner.sample([dataclasses.replace(x, launch=x.handle.launch) for x in samples])

    def wait(self, handle: Any) -> StepResult:
        return self.runner.wait(handle)

    def is_ready(self, handle: Any) -> bool:
        return self.runner.is_ready(handle)

    def _placed(self, launch: Launch) -> Launch:
        slots, index, pages = launch.page_writes[:, :, None]
        offsets = np.arange(self.page_size, dtype=np.int32)
        writes = np.broadcast_arrays(
            slots + self.first_slot,
            index * self.page_size + offsets,
            (pages - 1) * self.page_size + offsets + 1 + self.first_location,
        )
        flat = np.stack([w.reshape(-1) for w in writes]).astype(np.int32)
        return dataclasses.replace(launch, slots=launch.slots + self.first_slot, page_writes=flat)


def _shifted(progress: Progress, before: int, total: int, done: int, _: int, name: str) -> None:
    progress(before + done, total, name)


def pool_tokens(config: EngineConfig) -> int:
    assert config.max_total_tokens is not None
    return config.max_total_tokens // config.page_size * config.page_size


def longest_context(scenario: Scenario, config: EngineConfig) -> int:
    """At least the tokens, and the page they end in, that a request of the scenario can come to."""
    requests = [op for op in scenario.ops if op["op"] == "request"]
    tokens = max((len(op["prompt_ids"]) + op["max_new_tokens"] for op in requests), default=1)
    return min(tokens, pool_tokens(config)) + 2 * config.page_size + 2 * config.verify_reserve
