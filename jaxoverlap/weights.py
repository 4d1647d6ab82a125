"""Other weights for a running engine; see Engine.update_weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxoverlap.core import Runner
from jaxoverlap.interrupts import HeldInterrupts
from jaxoverlap.loading import ServedModel
from jaxoverlap.loop import EngineError, Loop
from jaxoverlap.progress import Report


@runtime_checkable
class Updatable(Protocol):
    """A runner whose weights can be replaced; see device/runner.py."""

    def check_weights(self, new: Mapping[str, Any]) -> None: ...

    def update_weights(self, new: dict[str, Any]) -> None: ...


def new_weights(given: Any, model: ServedModel, runner: Runner, progress: Report | None) -> dict[str, Any]:
    """`given` as arrays by parameter which the runner will take. Raises ValueError or CheckpointError naming what it
    will not."""
    if not isinstance(runner, Updatable):
        raise ValueError(f"model {model.name} runs on a device without weights: there are none to update")
    from jaxoverlap.checkpoint.tree import named_leaves
    from jaxoverlap.models import registry

    if isinstance(given, str | os.PathLike):
        new: dict[str, Any] = registry.read_weights(model, given, progress=progress)
    else:
        new = named_leaves(given)
    runner.check_weights(new)
    return new


def swap(loop: Loop, runner: Runner, new: dict[str, Any]) -> None:
    """While nothing turns. A failure ends the loop, since the weights are half replaced then."""
    assert isinstance(runner, Updatable)
    with HeldInterrupts():
        try:
            runner.update_weights(new)
        except BaseException as e:
            why = f"the weights are half replaced: {type(e).__name__}: {e}"
            loop.fail(why)
            raise EngineError(why) from e
