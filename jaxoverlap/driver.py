"""The driver: answers what a turn asks for, at once. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxoverlap.core import Drafts, Launch, Launches, Runner, Sample, Samples, StepResult, Sync, Turn, Wait

Exchange = Callable[[np.ndarray], np.ndarray]  # int64 [local ranks, len(Fact)] -> [ranks, len(Fact)]


def own_facts(facts: np.ndarray) -> np.ndarray:
    """The exchange of a rank, or of ranks, that are all there are."""
    return facts


class Driver:
    """Answers the turns of a rank, or of a group of them, from a runner; one method a kind of ask. A runner that runs
    steps of several ranks has their `exchange`."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.exchange: Exchange = getattr(runner, "exchange", own_facts)
        self.answers: dict[type, Callable[[Any], Any]] = {
            Launch: self.launch,
            Launches: self.launch_all,
            Sample: self.sample,
            Samples: self.sample_all,
            Wait: self.wait,
            Drafts: self.drafts,
            Sync: self.sync,
        }

    def turn(self, turn: Turn) -> None:
        """Runs one turn to its end. Whatever the turn or the runner raises comes out, with the turn closed."""
        send, answers = turn.send, self.answers
        answer: Any = None
        try:
            while True:
                try:
                    ask = send(answer)
                except StopIteration:
                    return
                answer = answers[type(ask)](ask)
        finally:
            turn.close()

    def launch(self, ask: Launch) -> Any:
        return self.runner.launch([ask])[0]

    def launch_all(self, ask: Launches) -> list[Any]:
        return self.runner.launch(ask.launches)

    def sample(self, ask: Sample) -> None:
        self.runner.sample([ask])

    def sample_all(self, ask: Samples) -> None:
        self.runner.sample(ask.samples)

    def wait(self, ask: Wait) -> StepResult:
        return self.runner.wait(ask.handle)

    def drafts(self, ask: Drafts) -> np.ndarray:
        return self.runner.drafts(ask.handle)  # type: ignore[attr-defined]

    def sync(self, ask: Sync) -> np.ndarray:
        return self.exchange(ask.facts)
