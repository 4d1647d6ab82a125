"""H15: whatever is asked for, nothing compiles once the engine stands; both loops give the same answers."""

import numpy as np
import pytest
from helpers_models import make_hf_dir
from jax import monitoring

from jaxoverlap.device.compile_guard import COMPILE_EVENT
from jaxoverlap.engine import Engine

SETTINGS = {
    **{"max_running_requests": 4, "context_length": 96, "max_total_tokens": 256, "page_size": 4, "random_seed": 0},
    **{"chunked_prefill_size": 16, "max_logprobs": 3, "audit": True, "poison_future_map": True},
}
GRAMMARS = [
    {"regex": "[a-f]{2,9}"},
    {"json_schema": '{"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}'},
    {"ebnf": 'root ::= "yes" | "no" | "maybe"'},
]
ADJUSTED = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.4, "repetition_penalty": 1.5},
    {"logit_bias": {"40": 3.0, "41": -100.0}},
    {"min_new_tokens": 3, "stop_token_ids": [60, 61, 62]},
]


def call(rng, shared):
    """Keyword arguments of one request: sampling, grammar, penalties and log-probabilities each at random."""
    prompt = rng.integers(3, 250, rng.integers(1, 33)).tolist()
    if rng.random() < 0.4:
        prompt = (shared[: rng.integers(1, 24)] + prompt)[:40]
    params = {"max_new_tokens": int(rng.integers(3, 14)), "temperature": 0.0}
    if rng.random() < 0.5:
        params |= {"temperature": float(rng.uniform(0.5, 1.5)), "top_k": int(rng.integers(1, 60)), "top_p": 0.9}
        params["sampling_seed"] = int(rng.integers(1 << 32))
    if rng.random() < 0.35:
        params |= GRAMMARS[rng.integers(len(GRAMMARS))]
    if rng.random() < 0.4:
        params |= ADJUSTED[rng.integers(len(ADJUSTED))]
    out = {"input_ids": prompt, "sampling_params": params}
    if rng.random() < 0.5:
        out |= {"return_logprob": True, "logprob_start_len": int(rng.integers(-1, len(prompt)))}
        out |= {"top_logprobs_num": int(rng.integers(0, 4)), "token_ids_logprob": [5, 6][: rng.integers(0, 3)]}
    return out


def drive(engine, calls, aborted, rng):
    """Ids and reason by request, for those that nobody aborted."""
    streams = []
    for i, one in enumerate(calls):
        streams.append(engine.generate(**one, rid=str(i), stream=True))
        for _ in range(int(rng.integers(0, 3))):
            engine._loop._turn()
        if i in aborted:
            engine._scheduler.abort(str(i), exact=True)
    results = []
    for i, stream in enumerate(streams):
        *_, last = stream
        reason = last["meta_info"]["finish_reason"]
        assert reason["type"] != "abort" or i in aborted, reason
        results.append(None if i in aborted else (last["output_ids"], reason))
    return results


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_hf_dir(tmp_path_factory.mktemp("tiny"), max_position_embeddings=96))


@pytest.mark.slow
def test_h15_with_everything_that_sampling_offers(model_dir):
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 250, 24).tolist()
    calls = [call(rng, shared) for _ in range(200)]
    aborted = set(rng.permutation(200)[:12].tolist())
    compiles, results = [], []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            compiles.append(event)

    for loop_off in (False, True):
        with Engine(model_path=model_dir, disable_overlap_schedule=loop_off, **SETTINGS) as engine:
            programs = len(engine.runner.programs)
            monitoring.register_event_duration_secs_listener(listen)
            try:
                results.append(drive(engine, calls, aborted, np.random.default_rng(4)))
                engine.wait_idle()
            finally:
                monitoring.unregister_event_duration_listener(listen)
            assert len(engine.runner.programs) == programs
            assert engine.metrics()["free_slots"] == 4
    assert compiles == []
    assert results[0] == results[1]
    assert sum(r is not None for r in results[0]) == 188


@pytest.mark.gpu
def test_penalties_and_log_probabilities_on_a_gpu(model_dir):
    """On the kernels as on XLA: the same tokens, log-probabilities to float32's precision."""
    params = {"max_new_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.4, "min_new_tokens": 8}
    told = []
    for kernels in ("pallas", "xla"):
        with Engine(model_path=model_dir, kernels=kernels, dtype="float32", **SETTINGS) as engine:
            r = engine.generate(input_ids=[[5, 6, 7], [9] * 20], sampling_params=params, return_logprob=True)
            told.append([(x["output_ids"], x["meta_info"]["output_token_logprobs"]) for x in r])
    for (ids, logprobs), (xla_ids, xla_logprobs) in zip(*told):
        assert ids == xla_ids
        np.testing.assert_allclose([p for p, *_ in logprobs], [p for p, *_ in xla_logprobs], atol=1e-3)
