"""Plays a scenario through the real scheduler and a runner, one loop at a time, and returns the recorded trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launches, Request, Runner, Samples, Sync, Wait
from jaxoverlap.parallel.group import Group
from jaxoverlap.replay.recorder import Recorder
from jaxoverlap.replay.scenario import CONTEXT_LENGTH, EOS, VOCAB_SIZE, Scenario
from jaxoverlap.replay.toys import ToyGrammarBackend, toy_text
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler import Scheduler

RunnerFactory = Callable[[EngineConfig, Scenario, int], Runner]  # for a rank


def play(scenario: Scenario, overlap: bool, make_runner: RunnerFactory, **settings: Any) -> Any:
    """The trace of one loop; with DP a list, one a rank. `settings`: EngineConfig fields beside the scenario's own."""
    return trace_of(record(scenario, overlap, make_runner, **settings))


def record(scenario: Scenario, overlap: bool, make_runner: RunnerFactory, **settings: Any) -> list[Recorder]:
    """One loop, played to its end; a recorder a rank."""
    return Player(scenario, scenario.engine_config(overlap, **settings), make_runner).run()


def trace_of(recorders: list[Recorder]) -> Any:
    return recorders[0].trace() if len(recorders) == 1 else [r.trace() for r in recorders]


class Player:
    def __init__(self, scenario: Scenario, config: EngineConfig, make_runner: RunnerFactory) -> None:
        self.scenario = scenario
        self.turn = 0
        self.runners = [make_runner(config, scenario, rank) for rank in range(config.dp_size)]
        self.recorders = [Recorder(config.speculative_num_draft_tokens > 0) for _ in range(config.dp_size)]
        assert config.max_total_tokens is not None
        self.schedulers = [
            Scheduler(
                config,
                max_total_tokens=config.max_total_tokens,
                context_length=CONTEXT_LENGTH,
                vocab_size=VOCAB_SIZE,
                decode=toy_text,
                grammar_backend=ToyGrammarBackend(lambda: self.turn, scenario.grammar_compile_turns),
                observer=self.recorders[rank],
            )
            for rank in range(config.dp_size)
        ]
        self.group = Group(self.schedulers)

    def run(self) -> list[Recorder]:
        idle = 0
        last = max((op["at"] for op in self.scenario.ops), default=-1)
        while self.turn < self.scenario.max_turns and idle <= self.scenario.idle_tail:
            self.deliver()
            disabled = [s.counters.overlap_disabled for s in self.schedulers]
            for recorder in self.recorders:
                recorder.begin(self.turn)
            self.turn_all()
            for s, recorder, before in zip(self.schedulers, self.recorders, disabled):
                recorder.end(s, s.counters.overlap_disabled > before)
            quiet = self.turn >= last and not any(s.has_work or s.is_paused for s in self.schedulers)
            idle = idle + 1 if quiet else 0
            self.turn += 1
        return self.recorders

    def deliver(self) -> None:
        for op in self.scenario.ops:
            if op["at"] != self.turn:
                continue
            if op["op"] == "request":
                self.schedulers[op.get("rank", 0)].submit(make_request(op))
                continue
            for s in self.schedulers:
                if op["op"] == "abort":
                    s.abort(op.get("rid", ""), abort_all=bool(op.get("all")))
                elif op["op"] == "pause":
                    s.pause(op["mode"])
                else:
                    s.resume()

    def turn_all(self) -> None:
        """One turn of every rank."""
        turn, answer = self.group.turn(), None
        try:
            while True:
                answer = self.answer(turn.send(answer))
        except StopIteration:
            pass

    def answer(self, asked: Any) -> Any:
        """Handles carry their rank."""
        match asked:
            case Sync():
                return asked.facts
            case Launches():
                handles = []
                for rank, launch in enumerate(asked.launches):
                    self.recorders[rank].launched(launch)
                    handles.append((rank, *self.runners[rank].launch([launch])))
                return handles
            case Samples():
                for sample in asked.samples:
                    rank, handle = sample.handle
                    self.recorders[rank].sampled(sample)
                    self.runners[rank].sample([replace(sample, handle=handle)])
            case Wait():
                rank, handle = asked.handle
                answer = self.runners[rank].wait(handle)
                self.recorders[rank].result(asked.launch, answer)
                return answer


def make_request(op: dict[str, Any]) -> Request:
    params = SamplingParams(
        max_new_tokens=op["max_new_tokens"],
        temperature=0.0,
        ignore_eos=op.get("ignore_eos", False),
        stop=op.get("stop"),
        stop_token_ids=op.get("stop_token_ids"),
        ebnf=None if op.get("grammar") is None else str(op["grammar"]),
    )
    assert params.stop_token_ids is not None
    eos = () if params.ignore_eos else (EOS, *params.stop_token_ids)
    return Request(
        rid=op["rid"],
        prompt_ids=np.array(op["prompt_ids"], np.int32),
        params=params,
        stream=True,
        return_logprob=op.get("return_logprob", False),
        priority=op.get("priority"),
        stop_ids=eos,
    )
