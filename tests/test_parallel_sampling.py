"""`n` above 1: so many results for each prompt, which is brought into the prefix cache once."""

import gc
import itertools

import numpy as np
import pytest
from helpers_constant import Constant
from helpers_engine import check_all_back, host_engine, oracle

from jaxoverlap.core import RequestError
from jaxoverlap.requests import SEED_STEP

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def params(tokens, n, **more):
    return {"max_new_tokens": tokens, "temperature": 0.0, "n": n, **more}


def ids_of(results):
    return [r["meta_info"]["id"] for r in results]


def reasons_of(results):
    return [r["meta_info"]["finish_reason"]["type"] for r in results]


@pytest.fixture(params=[False, True], ids=["overlap", "normal"])
def engine(request):
    with host_engine(disable_overlap_schedule=request.param) as engine:
        yield engine


def test_a_single_call_gives_a_list(engine):
    results = engine.generate(input_ids=PROMPT, sampling_params=params(6, 3), rid="a")
    assert [r["output_ids"] for r in results] == [oracle(PROMPT, 6)] * 3
    assert ids_of(results) == ["a_0", "a_1", "a_2"]
    assert all(set(r) == {"output_ids", "meta_info"} for r in results)
    check_all_back(engine)


def test_a_list_call_gives_the_copies_of_each_prompt_in_a_row(engine):
    prompts = [PROMPT, [3], PROMPT[::-1]]
    results = engine.generate(input_ids=prompts, sampling_params=[params(4, 2), params(5, 1), params(6, 3)], rid="a")
    want = [oracle(prompts[0], 4)] * 2 + [oracle(prompts[1], 5)] + [oracle(prompts[2], 6)] * 3
    assert [r["output_ids"] for r in results] == want
    assert ids_of(results) == ["a_0_0", "a_0_1", "a_1", "a_2_0", "a_2_1", "a_2_2"]
    check_all_back(engine)


@pytest.mark.parametrize("many", [False, True])
def test_streams_carry_the_place_in_that_list(engine, many):
    prompts = [PROMPT, PROMPT[::-1]] if many else [PROMPT]
    pieces = {}
    for r in engine.generate(input_ids=prompts if many else PROMPT, sampling_params=params(4, 3), stream=True):
        pieces.setdefault(r["index"], []).append(r["output_ids"])
    assert {i: p[-1] for i, p in pieces.items()} == {
        3 * i + copy: oracle(p, 4) for i, p in enumerate(prompts) for copy in range(3)
    }
    assert all(a == b[: len(a)] for p in pieces.values() for a, b in itertools.pairwise(p))


def prefilled(engine):
    return sum(int(x.extend_lens.sum()) for x in engine.runner.launches if x.mode.is_extend)


@pytest.mark.parametrize(
    ("prompt", "settings", "first", "each"),
    [
        (PROMPT, {}, 10, 1),
        (PROMPT, {"page_size": 4}, 10, 2),  # two whole pages are shared
        (PROMPT, {"chunked_prefill_size": 4}, 10, 1),
        (PROMPT, {"disable_radix_cache": True}, 0, 10),
        ([5], {}, 0, 1),  # nothing to share
        ([5, 6, 7, 8], {"page_size": 4}, 0, 4),
    ],
)
def test_the_prompt_is_computed_once(prompt, settings, first, each):
    with host_engine(**settings) as engine:
        results = engine.generate(input_ids=prompt, sampling_params=params(3, 4))
        assert [r["output_ids"] for r in results] == [oracle(prompt, 3)] * 4
        assert prefilled(engine) == first + 4 * each
        assert [r["meta_info"]["cached_tokens"] for r in results] == [len(prompt) - each] * 4


@pytest.mark.parametrize("turns", range(7))
def test_abort_means_all_copies(engine, turns):
    """At 0 turns they still wait for their prompt."""
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(60, 3), stream=True, rid="a")
    other = engine.generate(input_ids=[3], sampling_params=params(9, 1), stream=True, rid="b")
    start = engine.metrics()["turns"]
    engine._loop.drive(lambda: engine.metrics()["turns"] >= start + turns)
    engine.abort("a")
    last = {r["index"]: r for r in stream}
    assert reasons_of(last.values()) == ["abort"] * 3
    assert all(r["output_ids"] == oracle(PROMPT, 60)[: len(r["output_ids"])] for r in last.values())
    assert list(other)[-1]["output_ids"] == oracle([3], 9)
    check_all_back(engine)


@pytest.mark.parametrize("turns", [0, 1, 3, 5])
def test_abort_of_one_copy(engine, turns):
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(20, 3), stream=True, rid="a")
    start = engine.metrics()["turns"]
    engine._loop.drive(lambda: engine.metrics()["turns"] >= start + turns)
    engine.abort("a_1")
    last = {r["index"]: r for r in stream}
    assert [last[i]["meta_info"]["finish_reason"]["type"] for i in range(3)] == ["length", "abort", "length"]
    assert last[0]["output_ids"] == last[2]["output_ids"] == oracle(PROMPT, 20)
    check_all_back(engine)


@pytest.mark.parametrize("leave", ["close", "collect", "abort_all"])
def test_leaving_before_the_first_turn(engine, leave):
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(60, 3), stream=True)
    if leave == "close":
        stream.close()
    elif leave == "abort_all":
        engine.abort(abort_all=True)
        assert reasons_of(stream) == ["abort"] * 3
    del stream
    gc.collect()
    assert engine.metrics()["unfinished"] == 0
    check_all_back(engine)


def test_a_stream_collected_while_its_copies_are_let_go(engine):
    """The garbage collector may come between any two of them."""
    streams = [engine.generate(input_ids=PROMPT, sampling_params=params(60, 4), stream=True, rid="a")]
    submit = engine._scheduler.submit

    def collecting(request):
        if request.rid == "a_1":
            streams.clear()
            gc.collect()
        submit(request)

    engine._scheduler.submit = collecting
    assert engine.generate(input_ids=[3], sampling_params=params(30, 1))["output_ids"] == oracle([3], 30)
    assert streams == []
    assert engine.metrics()["unfinished"] == 0
    assert engine.metrics()["aborted"] == 4
    check_all_back(engine)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_while_the_prompt_is_brought_in(engine, mode):
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(7, 3), stream=True)
    engine.pause_generation(mode)
    engine.continue_generation()
    assert {r["index"]: r["output_ids"] for r in stream} == dict.fromkeys(range(3), oracle(PROMPT, 7))
    check_all_back(engine)


def test_more_copies_than_slots(engine):
    results = engine.generate(input_ids=PROMPT, sampling_params=params(5, 20))
    assert [r["output_ids"] for r in results] == [oracle(PROMPT, 5)] * 20
    check_all_back(engine)


def test_a_malformed_prompt_among_others(engine):
    prompts = [PROMPT, [], [4]]
    results = engine.generate(input_ids=prompts, sampling_params=params(3, 2), rid="a")
    assert ids_of(results) == ["a_0_0", "a_0_1", "a_1", "a_2_0", "a_2_1"]
    assert reasons_of(results) == ["length", "length", "abort", "length", "length"]
    with pytest.raises(RequestError, match="input_ids is empty"):
        engine.generate(input_ids=[], sampling_params=params(3, 2))
    with pytest.raises(RequestError, match="n must be at least 1"):
        engine.generate(input_ids=PROMPT, sampling_params=params(3, 0))


def test_ids_in_use_are_refused(engine):
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(9, 3), stream=True, rid="a")
    for rid, n in (("a", 3), ("a_2", 1)):
        with pytest.raises(RequestError, match="in use"):
            engine.generate(input_ids=[3], sampling_params=params(2, n), rid=rid)
    assert {r["index"]: r["output_ids"] for r in stream} == dict.fromkeys(range(3), oracle(PROMPT, 9))


# noise, on JAX: 1,000 ids that are equally likely


@pytest.fixture(scope="module")
def uniform():
    uniform = Constant(np.zeros(1000))
    yield uniform
    uniform.runner.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
def test_each_copy_has_noise_of_its_own(uniform, overlap):
    def outputs(n, seed=None):
        sampling = {"max_new_tokens": 12, "temperature": 1.0, "n": n, "sampling_seed": seed}
        results = uniform.engine(overlap).generate(input_ids=PROMPT, sampling_params=sampling)
        return [r["output_ids"] for r in (results if n > 1 else [results])]

    alone = [outputs(1, (7 + i * SEED_STEP) % (1 << 32))[0] for i in range(6)]
    copies = outputs(6, 7)
    assert copies == alone
    assert len({tuple(ids) for ids in copies}) == 6
    assert outputs(1)[0] == outputs(6)[0]  # unseeded, from the engine's random_seed
    assert len({tuple(ids) for ids in outputs(6)}) == 6
