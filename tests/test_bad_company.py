"""Odd requests through a whole engine: each ends as itself, and the ones beside it are untouched."""

import numpy as np
import pytest
from helpers_models import make_hf_dir

from jaxoverlap.core import RequestError
from jaxoverlap.engine import Engine

PROMPT = [5, 6, 7, 8, 9, 10]
SETTINGS = {
    **{"max_running_requests": 3, "chunked_prefill_size": 16, "context_length": 64, "max_total_tokens": 192},
    **{"skip_warmup": True, "max_logprobs": 4, "audit": True},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine(model_path=str(make_hf_dir(tmp_path_factory.mktemp("tiny"))), **SETTINGS) as engine:
        yield engine


def ids(engine, **params):
    return engine.generate(input_ids=PROMPT, sampling_params={"temperature": 0.0, **params})["output_ids"]


@pytest.mark.parametrize("start", [0, 3])
def test_a_bad_grammar_with_prompt_logprobs_ends_alone(engine, start):
    good = {"temperature": 0.0, "max_new_tokens": 4}
    alone = ids(engine, **good)
    asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
    with pytest.raises(RequestError, match="regex"):
        engine.generate(input_ids=PROMPT, sampling_params={"regex": "(abc"}, **asked)
    results = engine.generate(input_ids=[PROMPT, PROMPT], sampling_params=[good, {**good, "regex": "(ab"}], **asked)
    assert results[0]["output_ids"] == alone
    assert len(results[0]["meta_info"]["input_token_logprobs"]) == len(PROMPT) - start
    assert results[1]["meta_info"]["finish_reason"]["status_code"] == 400
    assert results[1]["output_ids"] == []


def test_no_tokens_under_a_grammar(engine):
    params = {"temperature": 0.0, "max_new_tokens": 0, "regex": "[ab]+"}
    result = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert result["output_ids"] == []
    assert result["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5, "logit_bias": {77: 3.4e38}},
        {"temperature": 2e-6, "logit_bias": {77: 1e33}},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "logit_bias": {77: 1e38}},
    ],
)
def test_a_bias_beyond_all_measure_decides(engine, params):
    assert ids(engine, **params, max_new_tokens=4, sampling_seed=1) == [77] * 4


def test_many_stop_ids_of_one_request_cost_the_others_nothing(engine):
    """Its tokens are looked at one by one; the table's columns stay as few as they were."""
    table = engine._scheduler.slots
    columns = table.stop_ids.shape[1]
    free = ids(engine, max_new_tokens=4)
    others = [t for t in range(272) if t not in free[:3]]
    result = engine.generate(
        input_ids=PROMPT, sampling_params={"temperature": 0.0, "max_new_tokens": 20, "stop_token_ids": others}
    )
    assert result["output_ids"][:3] == free[:3]
    assert result["meta_info"]["finish_reason"]["type"] == "stop"
    assert table.stop_ids.shape[1] == columns


def test_a_refused_request_draws_no_seed(tmp_path_factory):
    directory = str(make_hf_dir(tmp_path_factory.mktemp("tiny")))
    drawn = []
    for refused in (False, True):
        with Engine(model_path=directory, **SETTINGS, random_seed=3, grammar_backend="none") as e:
            if refused:
                with pytest.raises(RequestError, match="top_logprobs_num"):
                    e.generate(input_ids=PROMPT, return_logprob=True, top_logprobs_num=9)
            drawn.append(e.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 12})["output_ids"])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ({"sampling_params": {"json_schema": "{}"}, "response_format": {"type": "json_object"}}, ["json_schema"]),
        ({"sampling_params": {"json_schema": '{"minimum": ' + "1" * 5000 + "}"}}, ["json_schema"]),
        ({"sampling_params": {"json_schema": '{"minimum": 1e999}'}}, ["json_schema", "1e999 is out of range"]),
        ({"sampling_params": {"json_schema": '{"const": NaN}'}}, ["json_schema", "NaN"]),
        ({"sampling_params": {"json_schema": '{"const": "\\ud800"}'}}, ["json_schema"]),
        ({"sampling_params": {"json_schema": '{"format": "date", "pattern": "x", "allOf": 5}'}}, ["allOf", "int"]),
        ({"sampling_params": {"regex": "\ud800"}}, ["regex must hold valid Unicode"]),
        ({"sampling_params": {"ebnf": "\ud800"}}, ["ebnf must hold valid Unicode"]),
        ({"sampling_params": {"custom_params": np.array([1, 2])}}, ["custom_params is not supported"]),
        ({"sampling_params": {"repetition_penalty": 1e-300}}, ["repetition_penalty must be at least"]),
    ],
)
def test_errors_name_the_thing(engine, call, parts):
    with pytest.raises(RequestError) as error:
        engine.generate(input_ids=PROMPT, **call)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert len(ids(engine, max_new_tokens=2)) == 2
