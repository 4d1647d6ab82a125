"""Ranks turned by hand on the checksum rule, and random loads for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from host_runner import HostRunner, oracle

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Request
from jaxoverlap.driver import Driver
from jaxoverlap.parallel.group import Group
from jaxoverlap.replay.toys import FIRST, ToyGrammarBackend
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler import Scheduler

EOS, VOCAB, CONTEXT, TOTAL, ROWS = 2, 1000, 128, 320, 4
LOOPS = ("normal", "overlap")


def config_of(dp_size, loop="overlap", **settings):
    return EngineConfig(
        **{
            "model_path": "checksum",
            "max_running_requests": ROWS,
            "max_total_tokens": TOTAL,
            "chunked_prefill_size": 16,
            "random_seed": 0,
            "dp_size": dp_size,
            "enable_dp_attention": dp_size > 1,
            "disable_overlap_schedule": loop == "normal",
            "audit": True,
            **settings,
        }
    )


class HostRanks:
    """A NumPy device for each rank."""

    def __init__(self, config, first_rank=0, count=None):
        count = config.dp_size if count is None else count
        self.ranks = range(first_rank, first_rank + count)
        pages = config.max_total_tokens // config.page_size
        self.runners = [
            HostRunner(config.max_running_requests + 1, CONTEXT, pages, config.page_size) for _ in range(count)
        ]
        self.modes = []  # of each step, a ForwardMode a rank

    def launch(self, launches: list[Launch]):
        assert len(launches) == len(self.runners)
        self.modes.append(tuple(launch.mode for launch in launches))
        return [(i, *self.runners[i].launch([launch])) for i, launch in enumerate(launches)]

    def sample(self, samples):
        for sample in samples:
            i, handle = sample.handle
            self.runners[i].sample([type(sample)(sample.launch, handle, sample.mask)])

    def wait(self, handle):
        i, own = handle
        return self.runners[i].wait(own)


@dataclass
class Asked:
    """One request of a load. `grammar` > 0: the toy language of that length."""

    rid: str
    turn: int
    rank: int | None
    prompt: list[int]
    length: int
    stops: tuple[int, ...] = ()
    grammar: int = 0

    @property
    def want(self):
        if self.grammar:
            return [*range(FIRST, FIRST + self.grammar), EOS][: self.length]
        return oracle(self.prompt, self.length, self.stops)

    def request(self):
        params = SamplingParams(
            max_new_tokens=self.length,
            temperature=0.0,
            stop_token_ids=list(self.stops),
            ebnf=str(self.grammar) if self.grammar else None,
        )
        return Request(
            rid=self.rid,
            prompt_ids=np.array(self.prompt, np.int32),
            params=params,
            stream=True,
            data_parallel_rank=self.rank,
            stop_ids=(EOS, *self.stops),
        )


class Ranks:
    """A group and its driver over a runner of several ranks."""

    def __init__(self, runner, config, balance="round_robin"):
        self.now = 0
        self.schedulers = [
            Scheduler(
                config,
                max_total_tokens=config.max_total_tokens,
                context_length=CONTEXT,
                vocab_size=VOCAB,
                grammar_backend=ToyGrammarBackend(lambda: self.now, 2),
            )
            for _ in runner.ranks
        ]
        joint = len(runner.ranks) < config.dp_size
        self.group = Group(self.schedulers, first_rank=runner.ranks[0], is_joint=joint, load_balance_method=balance)
        self.driver = Driver(runner)
        self.launches = []  # of each turn, by rank
        self.requests: dict[str, Request] = {}

    def submit(self, *asked):
        for one in asked:
            self.requests[one.rid] = one.request()
            self.group.submit(self.requests[one.rid])

    def turn(self):
        self.driver.turn(self.group.turn())
        self.group.outputs.clear()  # as a loop does
        self.launches.append(tuple(s.counters.launches for s in self.schedulers))
        self.now += 1

    def run(self, load, limit=2000):
        """Plays a load to its end: {rid: output ids}."""
        last = max(one.turn for one in load)
        while self.now <= last or (self.group.anyone_works if self.group.is_joint else not self.group.is_idle):
            assert self.now < limit, "the ranks do not come to an end"
            self.submit(*(one for one in load if one.turn == self.now and one.rank in (None, *self.group.ranks)))
            self.turn()
        return self.outputs()

    def outputs(self):
        assert all(r.finished for r in self.requests.values())
        return {rid: r.output_ids[: r.shown_len].tolist() for rid, r in self.requests.items()}


def random_load(rng, dp_size, *, grammar=True):
    """Some ranks busy, some idle; long prompts in chunks on one, short ones that decode on others, a grammar on one."""
    load, busy = [], rng.permutation(dp_size)[: rng.integers(1, dp_size + 1)]
    constrained = int(busy[0]) if grammar and rng.random() < 0.5 else -1
    for rank in busy.tolist():
        long = rng.random() < 0.4
        for i in range(rng.integers(1, 5)):
            prompt = rng.integers(3, 900, rng.integers(30, 70) if long else rng.integers(1, 12)).tolist()
            length = int(rng.integers(1, 25))
            stops = ()
            if rng.random() < 0.3:
                stops = (int(rng.choice(oracle(prompt, length))),)
            of = int(rng.integers(1, 6)) if rank == constrained and i == 0 else 0
            turn = int(rng.integers(0, 20))
            load.append(Asked(f"{rank}-{i}", turn, rank, prompt, length, () if of else stops, of))
    return load


def rows_of(runner, i):
    """The state of a local rank but for what padding writes: row 0, and page 0 of the cache."""
    state = runner._state
    tables = [state.output_tokens, state.new_seq_lens, state.page_table, state.params]
    arrays = [*state.cache, *tables, state.tables.counts, state.tables.bias, state.tables.stops]
    return [np.asarray(runner.mesh.share(array, i))[1:].copy() for array in arrays]
