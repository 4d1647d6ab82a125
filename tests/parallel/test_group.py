"""Ranks that are turned together: launches in step, each request right and on its rank, failures that name the rank."""

import numpy as np
import pytest
from helpers_parallel import LOOPS, Asked, HostRanks, Ranks, config_of, oracle, random_load

from jaxoverlap.core import Fact, ForwardMode
from jaxoverlap.driver import Driver
from jaxoverlap.parallel.group import Group, RankError
from jaxoverlap.scheduler import Scheduler

SETTINGS = [
    {},
    {"enable_mixed_chunk": True},
    {"page_size": 4},
    {"disable_consecutive_prefill_overlap": True},
]


def ranks_of(dp_size, loop="overlap", **settings):
    config = config_of(dp_size, loop, **settings)
    runner = HostRanks(config)
    return Ranks(runner, config), runner


@pytest.mark.parametrize("dp_size", [2, 4])
def test_random_loads(dp_size):
    idle = delayed = 0
    for seed in range(60):
        load = random_load(np.random.default_rng(seed), dp_size)
        for loop in LOOPS:
            ranks, runner = ranks_of(dp_size, loop, **SETTINGS[seed % len(SETTINGS)])
            assert ranks.run(load) == {one.rid: one.want for one in load}, (seed, loop)
            assert all(len(set(counts)) == 1 for counts in ranks.launches), (seed, loop)
            for one in load:
                assert ranks.requests[one.rid].data_parallel_rank == one.rank
            idle += sum(ForwardMode.IDLE in modes for modes in runner.modes)
            delayed += sum(s.counters.sampling_delayed for s in ranks.schedulers)
    assert idle > 100
    assert delayed > 50


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rank_that_retracts(loop):
    """Its pool overflows; the other one's does not."""
    ranks, _ = ranks_of(2, loop, max_total_tokens=48, init_new_token_ratio=0.02, retract_decode_steps=2)
    load = [Asked(f"full{i}", 0, 0, [5 + i] * 4, 24) for i in range(3)] + [Asked("free", 2, 1, [9, 9], 30)]
    assert ranks.run(load) == {one.rid: one.want for one in load}
    assert ranks.schedulers[0].counters.retracted > 0
    assert ranks.schedulers[1].counters.retracted == 0
    assert all(len(set(counts)) == 1 for counts in ranks.launches)


def test_what_a_rank_tells_the_others():
    """SGLang's facts: a rank that prefills 5 tokens, one that has nothing."""
    ranks, _ = ranks_of(2)
    ranks.submit(Asked("a", 0, 1, [5, 6, 7, 8, 9], 3))
    tables = []
    ranks.driver.exchange = lambda facts: tables.append(facts) or facts
    ranks.turn()
    ranks.turn()
    first, second = tables
    modes = list(ForwardMode)
    assert first[0].tolist() == [0, 0, 1, 0, 0, modes.index(ForwardMode.IDLE), 1, 0, 0]
    assert first[1].tolist() == [5, 1, 0, 1, 0, modes.index(ForwardMode.EXTEND), 0, 0, 1]
    assert second[1].tolist() == [1, 1, 1, 0, 0, modes.index(ForwardMode.DECODE), 1, 0, 1]
    assert second[0, Fact.HAS_WORK] == 1  # its idle batch is in flight


def test_no_overlap_behind_a_prefill_of_another_rank():
    """The disable decision reads the synced flag: two prefills in a row, on different ranks."""
    ranks, _ = ranks_of(2, disable_consecutive_prefill_overlap=True)
    ranks.submit(Asked("a", 0, 0, [5] * 8, 4))
    ranks.turn()
    ranks.submit(Asked("b", 1, 1, [6] * 8, 4))
    ranks.turn()
    assert [s.counters.overlap_disabled for s in ranks.schedulers] == [1, 1]


def test_in_turn_or_to_the_shortest_queue():
    config = config_of(2)
    for balance, want in (("round_robin", [0, 1, 0, 1]), ("shortest_queue", [1, 1, 0, 1])):
        ranks = Ranks(HostRanks(config), config, balance)
        ranks.submit(*(Asked(f"early{i}", 0, 0, [5, 6], 9) for i in range(2)))
        ranks.turn()
        ranks.submit(*(Asked(f"late{i}", 0, None, [5, 6], 9) for i in range(4)))
        assert [ranks.requests[f"late{i}"].data_parallel_rank for i in range(4)] == want
        while not ranks.group.is_idle:
            ranks.turn()
        ranks.submit(Asked("last", 0, None, [5, 6], 9))
        assert ranks.requests["last"].data_parallel_rank == 0  # nobody has anything left


def test_an_operation_in_the_middle_of_a_turn_waits_for_the_next():
    """From another thread, when one rank has looked for operations and the other has not."""
    ranks, _ = ranks_of(2)
    ranks.submit(Asked("a", 0, 0, [5, 6], 9), Asked("b", 0, 1, [5, 6], 9))
    turn = Scheduler.turn

    def then_pause(self):
        ranks.group.pause("in_place")
        yield from turn(self)

    ranks.schedulers[0].turn = then_pause.__get__(ranks.schedulers[0])
    ranks.turn()
    assert [s.is_paused for s in ranks.schedulers] == [False, False]
    del ranks.schedulers[0].turn
    ranks.turn()
    assert [s.is_paused for s in ranks.schedulers] == [True, True]


def test_an_exception_in_one_turn_names_the_rank():
    ranks, _ = ranks_of(3)
    ranks.submit(Asked("a", 0, 0, [5, 6], 9))
    ranks.turn()
    ranks.schedulers[2].kv = None  # whatever it is: a fault
    ranks.submit(Asked("b", 0, 2, [5, 6], 9))
    with pytest.raises(RankError, match="rank 2: AttributeError") as e:
        ranks.turn()
    assert isinstance(e.value.__cause__, AttributeError)


def test_ranks_out_of_step_are_told():
    """One that skips its launch."""
    config = config_of(2)
    ranks = Ranks(HostRanks(config), config)

    def silent():
        return
        yield

    ranks.schedulers[1].turn = silent
    with pytest.raises(RankError, match=r"out of step: 0: Sync, 1: ends"):
        ranks.turn()


def test_abort_pause_and_flush_reach_every_rank():
    ranks, _ = ranks_of(2)
    load = [Asked(f"{i}", 0, i % 2, [5 + i, 6], 20) for i in range(4)]
    ranks.submit(*load)
    for _ in range(3):
        ranks.turn()
    ranks.group.abort("2", exact=True)
    ranks.group.pause("retract")
    ranks.turn()
    launches = ranks.group.launches
    ranks.turn()
    assert ranks.group.launches == launches
    ranks.group.resume()
    while not ranks.group.is_idle:
        ranks.turn()
    assert ranks.requests["2"].finish_reason.type == "abort"
    for one in load[:2] + load[3:]:
        assert ranks.requests[one.rid].output_ids.tolist() == oracle(one.prompt, 20)
    total = ranks.group.metrics()
    assert (total["finished"], total["aborted"]) == (4, 1)
    assert [m["free_slots"] for m in total["ranks"]] == [4, 4]
    assert total["evictable_tokens"] > 0
    ranks.group.flush_cache()
    ranks.turn()
    assert ranks.group.metrics()["evictable_tokens"] == 0


def test_one_scheduler_is_a_group_of_one():
    """The same turns either way."""
    config = config_of(1)
    load = [Asked(f"{i}", i, None, [5 + i] * 20, 8) for i in range(3)]
    ranks = Ranks(HostRanks(config), config)
    assert ranks.run(load) == {one.rid: one.want for one in load}
    assert isinstance(ranks.group, Group)
    assert isinstance(ranks.driver, Driver)
