"""The driver: answers what a turn asks for, at once. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxoverlap.core import Drafts, Launch, Launches, Runner, Sample, Samples, Sync, Turn, Wait

Exchange = Callable[[np.ndarray], np.ndarray]  # int64 [local ranks, len(Fact)] -> [ranks, len(Fact)]


def own_facts(facts: np.ndarray) -> np.ndarray:
    """The exchange of a rank, or of ranks, that are all there are."""
    return facts


class Driver:
    """Answers the turns of a rank, or of a group of them, from a runner. One that runs steps of
    several ranks has their `exchange`."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.exchange: Exchange = getattr(runner, "exchange", own_facts)

    def turn(self, turn: Turn) -> None:
        """Runs one turn to its end. Whatever the turn or the runner raises comes out, with the turn closed."""
        answer: Any = None
        try:
            while True:
                try:
                    ask = turn.send(answer)
                except StopIteration:
                    return
                answer = self.answer(ask)
        finally:
            turn.close()

    def answer(self, ask: Any) -> Any:
        if type(ask) is Launch:
            return self.runner.launch([ask])[0]
        if type(ask) is Wait:
            return self.runner.wait(ask.handle)
        if type(ask) is Sample:
            return self.runner.sample([ask])
        if type(ask) is Drafts:
            return self.runner.drafts(ask.handle)  # type: ignore[attr-defined]
        if type(ask) is Sync:
            return self.exchange(ask.facts)
        if type(ask) is Launches:
            return self.runner.launch(ask.launches)
        if type(ask) is Samples:
            return self.runner.sample(ask.samples)
        raise TypeError(f"a turn asked for {type(ask).__name__}")
