"""The driver of a single rank: answers what a turn asks for, at once. Imports no jax."""

from __future__ import annotations

from typing import Any

from jaxoverlap.core import Drafts, Launch, Runner, Sample, Sync, Turn, Wait


class Driver:
    """Answers Launch, Drafts, Sample and Wait from a runner, and Sync with this rank's own facts."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

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

    def stream(self, begin: float, end: float) -> None:
        """Hears when results were given to callers (`time.perf_counter`); only a recorder cares."""

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
            return ask.facts[None]
        raise TypeError(f"a turn asked for {type(ask).__name__}")
