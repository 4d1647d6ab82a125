"""Group: the schedulers of several data-parallel ranks, turned together by one loop. Imports no jax.

Their turns are generators. A group's turn advances each rank's until it asks for what concerns all (an exchange of
facts, a launch, a delayed sampling) and asks that once for all of them; a rank's other questions it passes on as they
come. To whoever turns it, a group is what a single scheduler is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import (
    Fact,
    Launch,
    Launches,
    Output,
    Request,
    Sample,
    Samples,
    Sync,
    Turn,
)
from jaxoverlap.scheduler.scheduler import Scheduler, Watch

Together = Sync | Launch | Sample
LoadBalance = Literal["round_robin", "shortest_queue"]


class RankError(RuntimeError):
    """A rank's turn failed, which ends all; the message names the rank, the failure is `__cause__`."""


class Group:
    """`schedulers` of ranks `first_rank` and following, those of this process; `is_joint`: there are others. A request
    goes to the rank that it names, else by `load_balance_method`: to each in turn, or to the one with the fewest
    unfinished requests."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        *,
        first_rank: int = 0,
        is_joint: bool = False,
        load_balance_method: LoadBalance = "round_robin",
    ) -> None:
        self.schedulers = list(schedulers)
        self.first_rank = first_rank
        self.is_joint = is_joint
        self.anyone_works = True  # on any rank anywhere, as the last exchange told
        self._outputs: deque[Output] = deque()
        self._in_turn = load_balance_method == "round_robin"
        self._next = 0
        self._assigned: dict[str, int] = {}  # ranks of unfinished requests
        self._operations: deque[Callable[[Scheduler], None]] = deque()  # for all ranks at once, at the next turn
        self._watch: Watch | None = None

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + len(self.schedulers))

    def choose(self, request: Request) -> int:
        """The rank that it names, or that the method chooses."""
        if request.data_parallel_rank is not None:
            return request.data_parallel_rank
        if self._in_turn:
            self._next += 1
            return self.ranks[(self._next - 1) % len(self.schedulers)]
        loads = Counter(self._assigned.values())
        return min(self.ranks, key=lambda rank: loads[rank])

    def assign(self, request: Request) -> None:
        """Chooses its rank, on which it counts as unfinished from now on."""
        request.data_parallel_rank = self._assigned[request.rid] = self.choose(request)

    def submit(self, request: Request) -> None:
        if request.rid not in self._assigned:
            self.assign(request)
        self.schedulers[self._assigned[request.rid] - self.first_rank].submit(request)

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> None:
        self._operations.append(lambda s: s.abort(rid, abort_all=abort_all, exact=exact))

    def pause(self, mode: str, *, flush: bool = False) -> None:
        self._operations.append(lambda s: s.pause(mode, flush=flush))

    def resume(self) -> None:
        self._operations.append(lambda s: s.resume())

    def flush_cache(self) -> None:
        self._operations.append(lambda s: s.flush_cache())

    @property
    def outputs(self) -> deque[Output]:
        """What the ranks have told since; whoever reads it clears it."""
        for s in self.schedulers:
            for output in s.outputs:
                if output.finished:
                    self._assigned.pop(output.request.rid, None)
            self._outputs.extend(s.outputs)
            s.outputs.clear()
        return self._outputs

    @property
    def watch(self) -> Watch | None:
        return self._watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._watch = watch
        for s in self.schedulers:
            s.watch = watch

    @property
    def max_total_tokens(self) -> int:
        """Of one rank, as all that follows."""
        return self.schedulers[0].max_total_tokens

    @property
    def max_prompt_len(self) -> int:
        return self.schedulers[0].max_prompt_len

    @property
    def launches(self) -> int:
        return self.schedulers[0].launches

    @property
    def num_waiting(self) -> int:
        return sum(s.num_waiting for s in self.schedulers)

    @property
    def is_idle(self) -> bool:
        return not self._operations and all(s.is_idle for s in self.schedulers)

    @property
    def has_work(self) -> bool:
        return any(s.has_work for s in self.schedulers)

    @property
    def only_compiles(self) -> bool:
        if self.is_joint:
            return False  # the other processes' turns do not wait for this one's grammars
        return self.has_work and all(s.only_compiles or s.is_idle for s in self.schedulers)

    @property
    def is_pending(self) -> bool:
        return bool(self._operations) or any(s.is_pending for s in self.schedulers)

    def metrics(self) -> dict[str, Any]:
        """Sums over the ranks here, and in "ranks" those of each."""
        ranks = [s.metrics() for s in self.schedulers]
        total: dict[str, Any] = {name: sum(m[name] for m in ranks) for name in ranks[0] if name != "last_result"}
        total |= {name: ranks[0][name] for name in ("turns", "launches")}
        total["last_result"] = max((m["last_result"] for m in ranks if m["last_result"] is not None), default=None)
        return {**total, "ranks": ranks}

    def turn(self) -> Turn:
        """One turn of every rank. Raises RankError."""
        while self._operations:  # seen by all in the same turn, whatever thread they come from
            operation = self._operations.popleft()
            for s in self.schedulers:
                operation(s)
        turns = [s.turn() for s in self.schedulers]
        try:
            yield from self._together(turns)
        finally:
            for turn in turns:
                turn.close()

    def _together(self, turns: list[Turn]) -> Turn:
        answers: list[Any] = [None] * len(turns)
        live = list(range(len(turns)))
        while live:
            asks: dict[int, Together] = {}
            for i in live:
                ask = yield from self._until_together(i, turns[i], answers[i])
                if ask is not None:
                    asks[i] = ask
            kinds = {type(ask) for ask in asks.values()}
            if len(kinds) > 1 or (kinds - {Sample} and len(asks) < len(live)):
                doing = ", ".join(f"{self.first_rank + i}: {_name(asks.get(i))}" for i in live)
                raise RankError(f"the ranks are out of step: {doing}")
            live = list(asks)
            if kinds:
                answers = yield from self._ask(asks, len(turns))

    def _ask(self, asks: dict[int, Together], count: int) -> Generator[Any, Any, list[Any]]:
        """Once for all; the answer for each rank."""
        some = next(iter(asks.values()))
        if isinstance(some, Sync):
            facts: list[np.ndarray] = [ask.facts for ask in asks.values()]  # type: ignore[union-attr]
            table = yield Sync(np.concatenate(facts))
            self.anyone_works = bool(table[:, Fact.HAS_WORK].any())
            return [table] * count
        if isinstance(some, Sample):
            yield Samples(list(asks.values()))  # type: ignore[arg-type]
            return [None] * count
        handles: list[Any] = yield Launches(list(asks.values()))  # type: ignore[arg-type]
        return handles

    def _until_together(self, i: int, turn: Turn, answer: Any) -> Generator[Any, Any, Together | None]:
        """Advances one rank; None: its turn has ended."""
        while True:
            try:
                ask = turn.send(answer)
            except StopIteration:
                return None
            except Exception as e:
                raise RankError(f"rank {self.first_rank + i}: {type(e).__name__}: {e}") from e
            if isinstance(ask, Together):
                if self._watch is not None and not isinstance(ask, Sample):
                    self._watch.mark("compose")
                return ask
            answer = yield ask


def _name(ask: Together | None) -> str:
    return "ends" if ask is None else type(ask).__name__


def group_of(config: EngineConfig, schedulers: Sequence[Scheduler], first_rank: int = 0) -> Scheduler | Group:
    """What a loop turns: a single rank's scheduler, or a group."""
    if config.dp_size == 1:
        return schedulers[0]
    joint = len(schedulers) < config.dp_size
    return Group(schedulers, first_rank=first_rank, is_joint=joint, load_balance_method=config.load_balance_method)
