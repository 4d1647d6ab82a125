"""Every field of SamplingParams: what it does has a closed form, and is the same with overlap on and off, alone and in
a batch with others, in every order of rows."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from helpers_constant import Constant
from helpers_engine import byte_level_tokenizer, host_engine

from jaxoverlap.sampling_params import SamplingParams

LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
END = 256

# On the NumPy device, which forces these ids: when a request ends, and what is shown of it.

SCRIPT = [*b"ab 12!", END, *b"cd"]
ALL = {"max_new_tokens": len(SCRIPT)}
LENGTH = {"type": "length", "length": 9}
WHOLE = ("ab 12!cd", 9, LENGTH)
ENDS = {  # field: (parameters, the same without it, (text, tokens, finish reason) with and without it)
    "max_new_tokens": ({"max_new_tokens": 4}, ALL, ("ab 1", 4, {"type": "length", "length": 4}), WHOLE),
    "stop": (ALL | {"stop": " 1"}, ALL, ("ab", 4, {"type": "stop", "matched": " 1"}), WHOLE),
    "stop_token_ids": (ALL | {"stop_token_ids": [END]}, ALL, ("ab 12!", 7, {"type": "stop", "matched": END}), WHOLE),
    "stop_regex": (ALL | {"stop_regex": r"\d+!"}, ALL, ("ab ", 6, {"type": "stop", "matched": r"\d+!"}), WHOLE),
    "ignore_eos": (
        ALL | {"stop_token_ids": [END], "ignore_eos": True},
        ALL | {"stop_token_ids": [END]},
        WHOLE,
        ("ab 12!", 7, {"type": "stop", "matched": END}),
    ),
    "skip_special_tokens": (ALL | {"skip_special_tokens": False}, ALL, ("ab 12!<|end|>cd", 9, LENGTH), WHOLE),
    "no_stop_trim": (
        ALL | {"stop": " 1", "no_stop_trim": True},
        ALL | {"stop": " 1"},
        ("ab 1", 4, {"type": "stop", "matched": " 1"}),
        ("ab", 4, {"type": "stop", "matched": " 1"}),
    ),
    # the tokenizers of transformers 5 put no spaces there either way
    "spaces_between_special_tokens": (
        ALL | {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        ALL | {"skip_special_tokens": False, "spaces_between_special_tokens": True},
        ("ab 12!<|end|>cd", 9, LENGTH),
        ("ab 12!<|end|>cd", 9, LENGTH),
    ),
}
INTERVALS = {1: [1, 2, 3, 4, 5, 6, 7, 8, 9], 4: [1, 5, 9], 100: [1, 9]}

# On JAX, over logits that are the same everywhere: 10 for id 0, and 0.1 less for each further id.

LOGITS = 10 - 0.1 * np.arange(32)
GREEDY = {"max_new_tokens": 10, "temperature": 0.0}
SEEDED = {"max_new_tokens": 40, "temperature": 1.0, "sampling_seed": 7}


def all_are(token):
    return lambda ids: set(ids) == {token}


def sampled(ids):
    return len(set(ids)) > 10


DRAWS = {  # field: (parameters, the same without it, what the ids are with and without it)
    "temperature": (SEEDED | {"temperature": 0.0}, SEEDED, all_are(0), sampled),
    "top_k": (SEEDED | {"top_k": 2}, SEEDED, lambda ids: set(ids) == {0, 1}, sampled),
    "top_p": (SEEDED | {"top_p": 1e-6}, SEEDED, all_are(0), sampled),
    "min_p": (SEEDED | {"min_p": 0.85}, SEEDED, lambda ids: set(ids) == {0, 1}, sampled),  # exp(-0.1) is 0.905
    "sampling_seed": (SEEDED, SEEDED | {"sampling_seed": 8}, sampled, sampled),
}
PENALTIES = {
    "frequency_penalty": (GREEDY | {"frequency_penalty": 2.0}, GREEDY, lambda ids: ids == [*range(10)], all_are(0)),
    "presence_penalty": (GREEDY | {"presence_penalty": 2.0}, GREEDY, lambda ids: ids == [*range(10)], all_are(0)),
    "repetition_penalty": (GREEDY | {"repetition_penalty": 2.0}, GREEDY, lambda ids: ids == [*range(10)], all_are(0)),
    "min_new_tokens": (
        GREEDY | {"stop_token_ids": [0], "min_new_tokens": 5},
        GREEDY | {"stop_token_ids": [0]},
        lambda ids: ids == [1, 1, 1, 1, 1, 0],
        lambda ids: ids == [0],
    ),
    "logit_bias": (GREEDY | {"logit_bias": {"5": 100.0}}, GREEDY, all_are(5), all_are(0)),
}
ON_DEVICE = pytest.mark.xfail(strict=True, reason="checked on the host, but not yet applied on the device")

ELSEWHERE = {  # field: the tests that show what it does, or that it is refused
    "stream_interval": "test_sampling_params_effects.py",
    "n": "test_parallel_sampling.py",
    "json_schema": "test_requests.py",
    "regex": "test_requests.py",
    "ebnf": "test_requests.py",
    "structural_tag": "test_requests.py",
    "custom_params": "test_requests.py",
}


def test_no_field_is_missing():
    tables = [ENDS, DRAWS, PENALTIES, ELSEWHERE]
    assert sorted(name for table in tables for name in table) == sorted(
        f.name for f in dataclasses.fields(SamplingParams)
    )
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (Path(__file__).parent / file).read_text()


def ends(sampling, overlap, **more):
    """(text, tokens, finish reason) of each request, all of one call."""
    tokenizer, rids = byte_level_tokenizer(), [f"r{i}" for i in range(len(sampling))]
    scripts = dict.fromkeys(rids, SCRIPT)
    with host_engine(
        tokenizer=tokenizer, vocab_size=257, scripts=scripts, disable_overlap_schedule=not overlap
    ) as engine:
        prompts = [[3 + i, 5] for i in range(len(sampling))]
        results = engine.generate(input_ids=prompts, sampling_params=sampling, rid=rids, **more)
    for r in results:
        assert r["output_ids"] == SCRIPT[: len(r["output_ids"])]
    return [(r["text"], len(r["output_ids"]), r["meta_info"]["finish_reason"]) for r in results]


@LOOPS
@pytest.mark.parametrize("field", ENDS)
def test_where_a_request_ends_and_what_is_shown(field, overlap):
    given, without, want, want_without = ENDS[field]
    assert given.get(field) != without.get(field)
    assert ends([given], overlap) == [want]
    assert ends([without], overlap) == [want_without]


@LOOPS
@pytest.mark.parametrize("fields", [[*ENDS][:4], [*ENDS][4:]])
def test_where_requests_end_in_one_batch(fields, overlap):
    for order in itertools.permutations(fields):
        assert ends([ENDS[f][0] for f in order], overlap) == [ENDS[f][2] for f in order]


@LOOPS
@pytest.mark.parametrize("order", [*itertools.permutations(INTERVALS)])
def test_stream_interval(order, overlap):
    """SGLang's rule: the first token, then every so many; and the end."""
    sampling = [{**ALL, "stream_interval": interval} for interval in order]
    counts = {i: [] for i in range(len(order))}
    scripts = {f"r_{i}": SCRIPT for i in counts}
    with host_engine(scripts=scripts, disable_overlap_schedule=not overlap) as engine:
        prompts = [[3 + i, 5] for i in counts]
        for r in engine.generate(input_ids=prompts, sampling_params=sampling, rid="r", stream=True):
            counts[r["index"]].append(len(r["output_ids"]))
    assert list(counts.values()) == [INTERVALS[interval] for interval in order]


@pytest.fixture(scope="module")
def slope():
    slope = Constant(LOGITS)
    yield slope
    slope.runner.shutdown()


def check_draws(slope, case, overlap):
    given, without, is_right, is_right_without = case
    (ids,), (ids_without,) = slope.outputs([given], overlap), slope.outputs([without], overlap)
    assert is_right(ids), ids
    assert is_right_without(ids_without), ids_without
    assert ids != ids_without


def check_batches(slope, cases, overlap):
    solo = [slope.outputs([given], overlap, prompts=[[3, 5]])[0] for given, *_ in cases]
    for order in itertools.permutations(range(len(cases))):
        prompts = [[3, 5 + i] for i in order]
        assert slope.outputs([cases[i][0] for i in order], overlap, prompts) == [solo[i] for i in order]


@LOOPS
@pytest.mark.parametrize("field", DRAWS)
def test_what_is_drawn(slope, field, overlap):
    check_draws(slope, DRAWS[field], overlap)


@LOOPS
@pytest.mark.parametrize("left_out", DRAWS)
def test_what_is_drawn_in_one_batch(slope, left_out, overlap):
    check_batches(slope, [case for field, case in DRAWS.items() if field != left_out], overlap)


@ON_DEVICE
@LOOPS
@pytest.mark.parametrize("field", PENALTIES)
def test_what_penalties_do(slope, field, overlap):
    check_draws(slope, PENALTIES[field], overlap)


@ON_DEVICE
@LOOPS
@pytest.mark.parametrize("left_out", PENALTIES)
def test_penalties_in_one_batch(slope, left_out, overlap):
    cases = [case for field, case in PENALTIES.items() if field != left_out]
    assert all(is_right(ids) for (_, _, is_right, _), ids in zip(cases, slope.outputs([c[0] for c in cases], overlap)))
    check_batches(slope, cases, overlap)
