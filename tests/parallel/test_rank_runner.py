"""Ranks on virtual devices: the checksum model, whose every token depends on every one in its rank's cache."""

import jax
import numpy as np
import pytest
from helpers_parallel import CONTEXT, LOOPS, Asked, Ranks, config_of, random_load, rows_of

from jaxoverlap.models.checksum import ChecksumModel
from jaxoverlap.parallel.mesh import RankMesh
from jaxoverlap.parallel.runner import RankRunner
from jaxoverlap.parallel.sync import FactExchange, exchange_devices


def make_runner(dp_size, devices=None, **settings):
    config = config_of(dp_size, poison_future_map=True, **settings)
    devices = devices or jax.devices()[:dp_size]
    runner = RankRunner(
        ChecksumModel(),
        config,
        RankMesh(devices),
        max_total_tokens=config.max_total_tokens,
        context_length=CONTEXT,
        exchange=FactExchange(exchange_devices("auto", devices, True)),
        cut=True,
    )
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def runners():
    made = {2: make_runner(2), 4: make_runner(4)}
    yield made
    for runner in made.values():
        runner.shutdown()


SETTINGS = [
    {},
    {"enable_mixed_chunk": True},
    {"chunked_prefill_size": 8},
    {"disable_consecutive_prefill_overlap": True},
    {"delay_sampling": "when-needed"},
]


def check_loads(runner, seeds):
    """tests/README.md H18: each output is the DP=1 oracle's, and all ranks launch as often."""
    dp_size, before = runner.mesh.size, runner.compiles
    delayed = 0
    for seed in seeds:
        load = random_load(np.random.default_rng(seed), dp_size)
        loop = LOOPS[seed % 2]
        ranks = Ranks(runner, config_of(dp_size, loop, **SETTINGS[seed % len(SETTINGS)]))
        assert ranks.run(load) == {one.rid: one.want for one in load}, seed
        assert all(len(set(counts)) == 1 for counts in ranks.launches), seed
        delayed += sum(s.counters.sampling_delayed for s in ranks.schedulers)
    assert runner.compiles == before
    assert delayed > 0


@pytest.mark.slow
def test_a_hundred_random_loads(runners):
    check_loads(runners[4], range(100))
    check_loads(runners[2], range(100, 110))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rank_without_work_changes_no_bit(runners, loop):
    """While it idles, through the others' prefills, chunks, decode steps and delayed samplings."""
    runner = runners[4]
    ranks = Ranks(runner, config_of(4, loop))
    ranks.run([Asked("first", 0, 2, [7, 8, 9], 5)])
    before = rows_of(runner, 2)
    load = [
        Asked("long", ranks.now, 0, [5] * 60, 6),
        Asked("short", ranks.now + 1, 1, [6, 7], 12),
        Asked("grammar", ranks.now + 2, 3, [8, 9, 10], 9, grammar=4),
    ]
    outputs = ranks.run(load)
    assert {one.rid: one.want for one in load}.items() <= outputs.items()
    for old, new in zip(before, rows_of(runner, 2), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_launch_that_never_met_the_others_is_refused(runners):
    ranks = Ranks(runners[2], config_of(2))
    ranks.driver.exchange = None
    ranks.submit(Asked("a", 0, 0, [5, 6], 2))
    asks = ranks.group.turn()
    sync = next(asks)
    launches = asks.send(sync.facts)
    for launch in launches.launches:
        object.__setattr__(launch, "global_num_tokens", None)
    with pytest.raises(ValueError, match="launch 1 has no global_num_tokens"):
        runners[2].launch(launches.launches)


def test_h18_all_kinds_of_work_at_once(runners):
    """tests/README.md H18: a long chunked prefill, decode, nothing, a grammar; then all drain; then one new request."""
    for loop in LOOPS:
        ranks = Ranks(runners[4], config_of(4, loop))
        load = [
            Asked("decode", 0, 1, [6, 7], 25),
            Asked("long", 3, 0, [5] * 90, 12),
            Asked("grammar", 3, 3, [8, 9, 10], 9, grammar=5),
        ]
        outputs = ranks.run(load)
        assert outputs == {one.rid: one.want for one in load}
        new = Asked("new", ranks.now, 2, [11, 12], 6)
        assert ranks.run([new])["new"] == new.want
        assert all(len(set(counts)) == 1 for counts in ranks.launches)


@pytest.mark.gpu
def test_ranks_on_gpus():
    """For machines with two or more GPUs."""
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two CUDA devices")
    runner = make_runner(2, devices[:2])
    check_loads(runner, range(10))
    runner.shutdown()
