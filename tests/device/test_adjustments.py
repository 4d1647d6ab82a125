"""Penalties, min_new_tokens and logit_bias through whole steps, on constant logits 9, 8, 7, ...: closed forms."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.core import Sample

from .helpers import ConstantModel, Driver, make_request, make_runner

VOCAB = 320  # more ids than one call of write_adjustments takes
FALLING = np.concatenate([np.arange(9.0, -1.0, -1.0), np.full(VOCAB - 10, -20.0)])


@pytest.fixture(scope="module")
def runner():
    runner = make_runner(ConstantModel(FALLING), cut=True)
    runner.warm_up()
    yield runner
    runner.shutdown()


def outputs(runner, requests, steps, order=None, late=()):
    """Each request's tokens after `steps` of its own, rows in `order`, those of `late` joining two steps later."""
    d = Driver(runner)
    slots = [i + 1 for i in (order or range(len(requests)))]
    for slot in slots:
        d.start(slot, requests[slot - 1])
    first = [s for s in slots if s - 1 not in late]
    d.run([(s, len(requests[s - 1].prompt_ids)) for s in first])
    for step in range(steps - 1 + 2 * bool(late)):
        if late and step == 1:
            joining = [s for s in slots if s not in first]
            d.run([(s, len(requests[s - 1].prompt_ids)) for s in joining])
        d.run((), [s for s in slots if d.outputs[s]])
    return [d.stop(slot)[:steps] for slot in range(1, len(requests) + 1)]


CASES = {
    "frequency": (
        {"frequency_penalty": 2.0},
        [0, 1, 0, 2, 1, 3, 0, 2],
    ),  # an id loses 2 a time; ties go to the lower id
    "presence": ({"presence_penalty": 1.5}, [0, 1, 0, 0, 0, 0, 0, 0]),  # 9 - 1.5 < 8, but 8 - 1.5 < 9 - 1.5
    "repetition": ({"repetition_penalty": 2.0}, [0, 1, 2, 3, 4, 0, 0, 0]),  # 4.5, 4, 3.5, 3 and 2.5 against 4 left
    "bias": ({"logit_bias": {"7": 100.0}}, [7] * 8),
    "forbidding bias": ({"logit_bias": {"0": -100.0, "1": -100.0}}, [2] * 8),
    "min_new": ({"min_new_tokens": 3, "stop_token_ids": [0]}, [1, 1, 1, 0, 0, 0, 0, 0]),
    "none": ({}, [0] * 8),
}


def test_the_closed_forms_above():
    """In float64, straight from the definition."""
    for params, expected in CASES.values():
        counts, tokens = np.zeros(VOCAB), []
        for step in range(8):
            x = FALLING.copy()
            there = counts > 0
            x -= params.get("frequency_penalty", 0) * counts + params.get("presence_penalty", 0) * there
            r = params.get("repetition_penalty", 1.0)
            x = np.where(there, np.where(x < 0, x * r, x / r), x)
            for token, bias in params.get("logit_bias", {}).items():
                x[int(token)] += bias
            if step < params.get("min_new_tokens", 0):
                x[params["stop_token_ids"]] = -np.inf
            tokens.append(int(x.argmax()))
            counts[tokens[-1]] += 1
        assert tokens == expected


@pytest.mark.parametrize("name", CASES)
def test_each_alone(runner, name):
    params, expected = CASES[name]
    assert outputs(runner, [make_request([5, 6, 7], **params)], 8) == [expected]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_mixed_batches_in_any_order(runner, order):
    names = ["frequency", "none", "min_new", "bias"]
    requests = [make_request([5, 6], **CASES[n][0]) for n in names]
    assert outputs(runner, requests, 8, order) == [CASES[n][1] for n in names]


def test_one_that_joins_a_running_batch_without_penalties(runner):
    requests = [make_request([1], **CASES[n][0]) for n in ("none", "repetition", "none")]
    assert outputs(runner, requests, 8, late=(1,)) == [[0] * 8, CASES["repetition"][1], [0] * 8]


def test_a_penalty_is_never_a_step_late(runner):
    """With large penalties every id comes once, in order: one step late would be 0, 0, 1, 1, ..."""
    request = make_request([1, 2], frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=2.0)
    d = Driver(runner)
    d.start(1, request)
    launched = [d.launch([(1, 2)])]
    launched += [d.launch((), [1]) for _ in range(4)]  # nothing is read back in between
    for x in launched:
        d.take(x)
    assert d.outputs[1] == [0, 1, 2, 3, 4]


def test_a_slot_starts_anew_with_its_next_request(runner):
    params = CASES["repetition"]
    for _ in range(2):
        assert outputs(runner, [make_request([5], **params[0])], 8) == [params[1]]
    assert outputs(runner, [make_request([5])], 8) == [[0] * 8]


def test_chunks_of_a_prompt_are_no_outputs(runner):
    d = Driver(runner)
    d.start(1, make_request(range(9), **CASES["repetition"][0]))
    for _ in range(3):
        d.run([(1, 3)])
    for _ in range(7):
        d.run((), [1])
    assert d.stop(1) == CASES["repetition"][1]


def test_a_retracted_request_brings_its_outputs_along(runner):
    """Prefilled again with its prompt and the outputs that it kept, in chunks, into another slot."""
    params, expected = CASES["repetition"]
    d = Driver(runner)
    request = make_request([5, 6], **params)
    d.start(1, request)
    d.run([(1, 2)])
    for _ in range(3):
        d.run((), [1])
    d.run((), [1])
    d.outputs[1].pop()  # in flight at the retraction: dropped
    kept = list(d.outputs[1])
    d.stop(1)
    request.kept_ids = np.array(kept, np.int32)
    d.start(3, request)
    d.outputs[3] = kept
    d.lens[3] = 0
    context = len(d.known(3))
    d.launch([(3, 3)])
    launched = d.launch([(3, context - 3)])
    d.take(launched)
    for _ in range(8 - len(d.outputs[3])):
        d.run((), [3])
    assert d.outputs[3] == expected


def test_many_biases_take_several_calls(runner):
    """All ids but one are forbidden, and that one is the last of the vocabulary."""
    bias = dict.fromkeys(range(VOCAB - 1), -100.0)
    assert outputs(runner, [make_request([5], logit_bias=bias)], 3) == [[VOCAB - 1] * 3]


def test_delayed_sampling_counts_too(runner):
    params, expected = CASES["repetition"]
    d = Driver(runner)
    d.start(1, make_request([5], **params))
    everything = np.full((1, 1, -(-VOCAB // 32)), -1, np.int32)
    for step in range(8):
        launched = d.launch([(1, 1)] if step == 0 else (), () if step == 0 else [1], delay_sample=True)
        runner.sample([Sample(launched[0], launched[1], everything)])
        d.take(launched)
    assert d.stop(1) == expected


def test_min_new_tokens_forbids_the_models_eos_also_with_ignore_eos():
    model = ConstantModel(FALLING)
    model.config = type(model.config)(vocab_size=VOCAB, span=1, offset=0, eos_token_ids=(0,))
    runner = make_runner(model, skip_warmup=True)
    request = make_request([5], min_new_tokens=2, stop_token_ids=[1], ignore_eos=True)
    assert outputs(runner, [request], 4) == [[2, 2, 0, 0]]
    runner.shutdown()


def test_sampled_rows_follow_the_adjusted_distribution(runner):
    """A bias that makes two ids certain, equally likely: about half each, never another."""
    request = make_request([5], temperature=1.0, seed=3, logit_bias={20: 60.0, 21: 60.0})
    (tokens,) = outputs(runner, [request], 60)
    assert set(tokens) == {20, 21}
    assert 15 <= tokens.count(20) <= 45


def test_tables_live_once(runner):
    assert runner._state.tables.counts.shape == (5, VOCAB)
    assert runner._state.tables.counts.dtype == jnp.int32
