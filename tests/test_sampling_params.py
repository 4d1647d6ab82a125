"""What SamplingParams takes and how it keeps it; what it refuses is in test_requests.py, as callers see it."""

import dataclasses
import math

import numpy as np

from jaxoverlap.sampling_params import SamplingParams


def test_the_defaults_are_sglangs():
    """python/sglang/srt/sampling/sampling_params.py of v0.5.14, written out; what is not here is None there."""
    want = {
        "max_new_tokens": 128,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": False,
    }
    assert {f.name: f.default for f in dataclasses.fields(SamplingParams) if f.default is not None} == want


def test_none_is_the_default_of_all_but_max_new_tokens():
    """As in SGLang, whose HTTP callers may send null."""
    names = [f.name for f in dataclasses.fields(SamplingParams) if f.name != "max_new_tokens"]
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(max_new_tokens=None).max_new_tokens is None


def test_the_ends_of_the_ranges_are_taken():
    p = SamplingParams(frequency_penalty=-2, presence_penalty=2, repetition_penalty=2)
    assert (p.frequency_penalty, p.presence_penalty, p.repetition_penalty) == (-2.0, 2.0, 2.0)
    assert SamplingParams(max_new_tokens=8, min_new_tokens=8).min_new_tokens == 8
    assert SamplingParams(max_new_tokens=None, min_new_tokens=1000).min_new_tokens == 1000


def test_logit_bias_is_kept_by_int_id():
    given = {"5": 1, np.int32(7): np.float32(-0.5), 3: -1e30}
    params = SamplingParams(logit_bias=given)
    assert params.logit_bias == {5: 1.0, 7: -0.5, 3: -1e30}
    assert {(type(k), type(v)) for k, v in params.logit_bias.items()} == {(int, float)}
    given["6"] = math.inf
    assert 6 not in params.logit_bias
    assert dataclasses.replace(params, n=1) == params
    assert SamplingParams(logit_bias={}).logit_bias == {}


def test_stop_token_ids_may_be_a_set():
    assert SamplingParams(stop_token_ids={7}).stop_token_ids == (7,)
