"""What callers are told of log-probabilities, over the NumPy device. Every entry there depends on all tokens before it,
so that a place left out, told twice, or read from another row shows."""

import numpy as np
import pytest
from helpers_engine import check_all_back, host_engine, oracle
from host_runner import logprob, top_ids

from jaxoverlap.core import ForwardMode

LOOPS = ["overlap", "normal"]
K = 3
PROMPT = [5, 250, 17, 17, 3, 99, 40, 42, 8, 77, 61, 12, 300, 4, 9, 21, 22, 23, 600, 18]


def params(n, **more):
    return {"max_new_tokens": n, "temperature": 0.0, **more}


def engine_on(loop="overlap", **settings):
    settings = {"max_logprobs": K, "chunked_prefill_size": 8, **settings}
    return host_engine(disable_overlap_schedule=loop == "normal", **settings)


def told(meta):
    return {name: value for name, value in meta.items() if name.endswith("logprobs")}


def expected(prompt, outputs, start=-1, top=0, ids=()):
    """SGLang's lists, from its rules: the prompt's entries begin at `start`, the first without a log-probability."""
    context = [*prompt, *outputs]

    def entries(place, wanted):
        return [(logprob(context[:place], t), t, None) for t in wanted]

    def lists(of_place):
        """What `of_place` says of each place, for prompt and outputs."""
        inputs = [None, *map(of_place, range(start + 1, len(prompt)))] if 0 <= start < len(prompt) else []
        return inputs, [of_place(n) for n in range(len(prompt), len(context))]

    inputs, output = lists(lambda n: entries(n, [context[n]])[0])
    out = {"input_token_logprobs": inputs, "output_token_logprobs": output}
    if inputs:
        inputs[0] = (None, prompt[start], None)
    if top:
        out["input_top_logprobs"], out["output_top_logprobs"] = lists(lambda n: entries(n, top_ids(context[:n], top)))
    if ids:
        out["input_token_ids_logprobs"], out["output_token_ids_logprobs"] = lists(lambda n: entries(n, ids))
    return out


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("start", [-1, 0, 1, 8, 13, 19, 20])
def test_every_list(loop, page_size, start):
    """The prompt comes in chunks of 8; it starts in a chunk's middle, at its edge, at the last token, behind it."""
    engine = engine_on(loop, page_size=page_size)
    for top, ids in ((0, ()), (2, ()), (0, (7, 900)), (3, (900, 7, 7))):
        asked = {"logprob_start_len": start, "top_logprobs_num": top, "token_ids_logprob": list(ids)}
        r = engine.generate(input_ids=PROMPT, sampling_params=params(4), return_logprob=True, **asked)
        assert r["output_ids"] == oracle(PROMPT, 4)
        assert told(r["meta_info"]) == expected(PROMPT, oracle(PROMPT, 4), start, top, ids)
    check_all_back(engine)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_is_taken_from_the_cache_up_to_the_start(loop, page_size):
    engine = engine_on(loop, page_size=page_size)
    engine.generate(input_ids=PROMPT, sampling_params=params(1))
    cached = {}
    for start in (-1, 0, 7, 12, 19, 20):
        r = engine.generate(
            input_ids=PROMPT,
            sampling_params=params(2),
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=1,
        )
        assert told(r["meta_info"]) == expected(PROMPT, oracle(PROMPT, 2), start, 1)
        cached[start] = r["meta_info"]["cached_tokens"]
    limits = {-1: 19, 0: 0, 7: 7, 12: 12, 19: 19, 20: 19}
    assert cached == {start: limit // page_size * page_size for start, limit in limits.items()}
    check_all_back(engine)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_neither_loses_nor_repeats(loop, page_size):
    """The pool is far too small for what is admitted; prompts come back with their outputs behind them."""
    engine = engine_on(
        loop, page_size=page_size, max_total_tokens=80, init_new_token_ratio=0.05, retract_decode_steps=2
    )
    prompts = [[7 + i, *PROMPT[:7]] for i in range(4)]
    asked = [(0, 2, (9,)), (-1, 1, ()), (3, 0, ()), (-1, 0, (5, 6))]
    results = engine.generate(
        input_ids=prompts,
        sampling_params=params(24, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=[start for start, _, _ in asked],
        top_logprobs_num=[top for _, top, _ in asked],
        token_ids_logprob=[list(ids) for _, _, ids in asked],
    )
    assert engine.metrics()["retracted"] > 0
    for p, r, one in zip(prompts, results, asked):
        assert told(r["meta_info"]) == expected(p, oracle(p, 24), *one)
    check_all_back(engine)


@pytest.mark.parametrize("turns", range(1, 6))
def test_retracted_in_the_middle_of_the_prompt(turns):
    engine = engine_on()
    asked = {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 1}
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(3), stream=True, **asked)
    for _ in range(turns):
        engine._loop._turn()
    engine.pause_generation("retract")
    engine.continue_generation()
    *_, last = stream
    assert told(last["meta_info"]) == expected(PROMPT, oracle(PROMPT, 3), 2, 1)
    check_all_back(engine)


def test_a_streamed_result_holds_everything_so_far():
    engine = engine_on()
    outputs, seen = oracle(PROMPT, 5), []
    asked = {"return_logprob": True, "logprob_start_len": 4, "top_logprobs_num": 2, "token_ids_logprob": [3]}
    for r in engine.generate(input_ids=PROMPT, sampling_params=params(5), stream=True, **asked):
        n = len(r["output_ids"])
        assert told(r["meta_info"]) == expected(PROMPT, outputs[:n], 4, 2, (3,))
        for value in told(r["meta_info"]).values():
            value.clear()  # the caller's own lists
        seen.append(n)
    assert seen == [1, 2, 3, 4, 5]


def test_a_stop_ends_the_lists_with_the_tokens():
    outputs = oracle(PROMPT, 8)
    engine = engine_on()
    sampling = params(8, stop_token_ids=[outputs[3]])
    r = engine.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True, top_logprobs_num=1)
    assert told(r["meta_info"]) == expected(PROMPT, outputs[:4], top=1)


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_that_generates_nothing_is_told_what_would_follow(others):
    """As SGLang's prefill-only requests: one entry of the likeliest and of the chosen ids, no output token. The same
    beside a request that generates."""
    engine = engine_on(chunked_prefill_size=32)
    prompts = [PROMPT, [4, 5, 6]][: 1 + others]
    sampling = [params(0), params(3)][: 1 + others]
    asked = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [9]}
    r = engine.generate(input_ids=prompts, sampling_params=sampling, **asked)[0]
    assert r["output_ids"] == []
    want = expected(PROMPT, oracle(PROMPT, 1), 1, 2, (9,))
    assert told(r["meta_info"]) == {**want, "output_token_logprobs": []}


def test_aborted_in_the_middle_of_its_prompt():
    engine = engine_on()
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    stream = engine.generate(input_ids=PROMPT, sampling_params=params(3), rid="a", stream=True, **asked)
    for _ in range(2):
        engine._loop._turn()
    engine.abort("a")
    (last,) = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert set(told(last["meta_info"])) == set(expected(PROMPT, [], 0, 1))
    assert not any(told(last["meta_info"]).values())
    check_all_back(engine)


def test_neighbours_are_told_only_what_they_asked_for():
    engine = engine_on()
    prompts = [PROMPT, PROMPT[3:], PROMPT[5:12]]
    results = engine.generate(
        input_ids=prompts,
        sampling_params=params(4),
        return_logprob=[True, False, True],
        top_logprobs_num=[2, None, 0],
        logprob_start_len=[None, -1, 0],
    )
    want = [oracle(p, 4) for p in prompts]
    assert told(results[0]["meta_info"]) == expected(prompts[0], want[0], top=2)
    assert told(results[1]["meta_info"]) == {}
    assert told(results[2]["meta_info"]) == expected(prompts[2], want[2], 0)


def test_only_launches_with_a_row_that_wants_details_give_them():
    """Output log-probabilities alone take the common way; those of a prompt leave it with the prompt."""
    engine = engine_on()
    launches = engine.runner.launches
    engine.generate(input_ids=[PROMPT, PROMPT[2:]], sampling_params=params(4), return_logprob=[True, False])
    assert not any(x.output_details or x.input_spans is not None for x in launches)
    launches.clear()
    engine.generate(input_ids=PROMPT[1:], sampling_params=params(4), return_logprob=True, logprob_start_len=12)
    engine.wait_idle()
    assert [x.input_spans is not None for x in launches if x.mode is ForwardMode.EXTEND] == [False, True, True]
    assert not any(x.output_details for x in launches)
    assert not any(x.input_spans is not None for x in launches if x.mode is ForwardMode.DECODE)


def test_rows_with_logprobs_are_not_mixed():
    """As in SGLang."""
    for wants, modes in ((False, {ForwardMode.MIXED}), (True, set())):
        engine = engine_on(enable_mixed_chunk=True)
        asked = {"return_logprob": wants, "top_logprobs_num": int(wants)}
        first = engine.generate(input_ids=PROMPT[:3], sampling_params=params(12), stream=True, **asked)
        next(first)
        engine.generate(input_ids=PROMPT, sampling_params=params(2))
        list(first)
        assert {x.mode for x in engine.runner.launches} & {ForwardMode.MIXED} == modes


SETTINGS = [
    {},
    {"page_size": 4},
    {"max_running_requests": 2, "schedule_policy": "lpm"},
    {"disable_radix_cache": True},
    {"enable_mixed_chunk": True},
    {"max_total_tokens": 64, "init_new_token_ratio": 0.05, "retract_decode_steps": 2},
]


def random_request(rng, shared, longest):
    prompt = rng.integers(3, 900, rng.integers(1, longest)).tolist()
    if rng.random() < 0.4:
        prompt = (shared[: rng.integers(1, len(shared))] + prompt)[:longest]
    start = int(rng.integers(-1, len(prompt) + 1))
    top, ids = int(rng.integers(0, K + 1)), tuple(rng.integers(0, 1000, rng.integers(0, K + 1)).tolist())
    return prompt, bool(rng.random() < 0.7), start if rng.random() < 0.6 else -1, top, ids


@pytest.mark.parametrize("seed", range(24))
def test_random_loads(seed):
    """Arrivals and aborts anywhere: whoever is not aborted is told exactly its lists, in both loops."""
    settings = SETTINGS[seed % len(SETTINGS)]
    small = "max_total_tokens" in settings
    retracted = 0
    for loop in LOOPS:
        rng = np.random.default_rng(seed)
        shared = rng.integers(3, 900, 30).tolist()
        engine, streams = engine_on(loop, **settings), []
        for i in range(10):
            prompt, wants, *asked = random_request(rng, shared, 10 if small else 40)
            n = int(rng.integers(1, 40 if small else 10))
            more = dict(zip(("logprob_start_len", "top_logprobs_num", "token_ids_logprob"), asked)) if wants else {}
            stream = engine.generate(
                input_ids=prompt, sampling_params=params(n), rid=str(i), stream=True, return_logprob=wants, **more
            )
            streams.append((prompt, n, asked if wants else None, stream))
            for _ in range(int(rng.integers(0, 4))):
                engine._loop._turn()
            if rng.random() < 0.15:
                engine._scheduler.abort(str(int(rng.integers(0, i + 1))), exact=True)
        for prompt, n, asked, stream in streams:
            *_, r = stream
            meta, outputs = r["meta_info"], oracle(prompt, n)
            aborted = meta["finish_reason"]["type"] == "abort"
            assert outputs[: len(r["output_ids"])] == r["output_ids"]
            assert aborted or outputs == r["output_ids"]
            if asked is None:
                assert told(meta) == {}
            elif not aborted or r["output_ids"]:
                assert told(meta) == expected(prompt, r["output_ids"], *asked)
        retracted += engine.metrics()["retracted"]
        check_all_back(engine)
    assert retracted > 0 or not small
