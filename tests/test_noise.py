"""Noise of sampled requests through the engine, on constant logits (tests/README.md H12, H13)."""

import itertools

import numpy as np
import pytest
from helpers_constant import Constant
from jax import monitoring

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
TIED = np.full(64, -1.0)
TIED[[9, 41]] = 3.0


@pytest.fixture(scope="module")
def warm():
    """1,000 ids that are equally likely."""
    warm = Constant(np.zeros(1000), rows=8)
    yield warm
    warm.runner.shutdown()


@pytest.fixture
def uniform(warm):
    """`warm`, and no compile in the test."""
    compiles = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield warm
    monitoring.unregister_event_duration_listener(listen)
    assert compiles == []


@pytest.fixture(scope="module")
def tied():
    tied = Constant(TIED)
    yield tied
    tied.runner.shutdown()


def draw(seed=None, n=32, temperature=1.0):
    return {"max_new_tokens": n, "temperature": temperature, "sampling_seed": seed}


@LOOPS
def test_h12_noise_is_new_for_each_token_and_request(uniform, overlap):
    engine = uniform.engine(overlap, random_seed=None)
    runs = [engine.generate(input_ids=[5], sampling_params=draw(n=60))["output_ids"] for _ in range(2)]
    assert runs[0] != runs[1]
    assert all(len(set(ids)) > 40 for ids in runs)


@LOOPS
def test_h12_a_seed_gives_the_same_ids_wherever_the_request_is(uniform, overlap):
    (alone,) = uniform.outputs([draw(7)])
    assert uniform.outputs([draw(8)]) != [alone]
    rows = [draw(i + 100) for i in range(8)]
    rows[3] = draw(7)
    outputs = uniform.outputs(rows, overlap)
    assert outputs[3] == alone
    assert len({tuple(ids) for ids in outputs}) == 8
    engine = uniform.engine(overlap)
    others = engine.generate(input_ids=[[5], [6]], sampling_params=[draw(n=40), draw(n=5)], stream=True)
    for _ in range(4):
        next(others)
    late = engine.generate(input_ids=[9, 9], sampling_params=draw(7), stream=True)
    assert list(late)[-1]["output_ids"] == alone
    list(others)


@LOOPS
def test_h12_greedy_is_not_touched(uniform, overlap):
    rows = [draw(), draw(temperature=0.0), draw(3), draw(temperature=0.0)]
    outputs = uniform.outputs(rows, overlap)
    assert outputs[1] == outputs[3] == [0] * 32  # the lowest id of equal ones


@LOOPS
def test_h13_each_row_is_sampled_with_its_own_parameters(tied, overlap):
    """Every order of rows; the rows end one after another, so that each also runs without the others."""
    rows = [draw(temperature=0.0), {**draw(), "top_k": 1}, {**draw(), "top_p": 1e-6}, draw(5)]
    for i, row in enumerate(rows):
        row["max_new_tokens"] = 8 + 6 * i
    (seeded,) = tied.outputs([rows[3]])
    assert {9, 41} <= set(seeded)
    want = [[9] * 8, [9] * 14, [9] * 20, seeded]
    for order in itertools.permutations(range(4)):
        prompts = [[3, 5 + i] for i in order]
        assert tied.outputs([rows[i] for i in order], overlap, prompts) == [want[i] for i in order]


@LOOPS
def test_h13_rows_that_join_change_nothing(tied, overlap):
    engine = tied.engine(overlap)
    (alone,) = tied.outputs([draw(5)], prompts=[[3]])
    engine = tied.engine(overlap)
    seeded = engine.generate(input_ids=[3], sampling_params=draw(5), stream=True)
    got = next(seeded)
    for i, row in enumerate([draw(temperature=0.0, n=3), {**draw(n=3), "top_k": 1}, {**draw(n=3), "top_p": 1e-6}]):
        assert engine.generate(input_ids=[4 + i], sampling_params=row)["output_ids"] == [9] * 3
        got = next(seeded)
    *_, got = itertools.chain([got], seeded)
    assert got["output_ids"] == alone
