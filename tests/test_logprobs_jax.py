"""H15 with log-probabilities of every kind, over the checksum model on JAX: whatever is asked for, nothing compiles."""

import numpy as np
import pytest
from helpers_engine import check_all_back, model_of, oracle
from jax import monitoring

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.compile_guard import COMPILE_EVENT
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.models.checksum import ChecksumModel

K, CONTEXT, TOTAL, GAP = 4, 128, 320, 1000.0
SETTINGS = {
    **{"model_path": "checksum", "max_running_requests": 4, "page_size": 4, "chunked_prefill_size": 32},
    **{"max_logprobs": K, "random_seed": 0, "audit": True, "poison_future_map": True},
}


@pytest.fixture(scope="module")
def runner():
    runner = JaxRunner(ChecksumModel(), EngineConfig(**SETTINGS), max_total_tokens=TOTAL, context_length=CONTEXT)
    runner.warm_up()
    yield runner
    runner.shutdown()


def random_calls(rng, count):
    """Keyword arguments of one request each."""
    prompts = [rng.integers(3, 900, rng.integers(1, 65)).tolist() for _ in range(count)]
    for i in range(3, count, 4):  # prefix hits
        prompts[i] = (prompts[i - 1][: len(prompts[i - 1]) // 2 + 1] + prompts[i])[:64]
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8}]
    for i, prompt in enumerate(prompts):
        params = {**kinds[i % 3], "max_new_tokens": int(rng.integers(0, 12))}
        call = {"input_ids": prompt, "sampling_params": params, "return_logprob": bool(rng.random() < 0.8)}
        if call["return_logprob"]:
            call["logprob_start_len"] = int(rng.integers(-1, len(prompt) + 1))
            call["top_logprobs_num"] = int(rng.integers(0, K + 1))
            call["token_ids_logprob"] = rng.integers(0, 1000, rng.integers(0, K + 1)).tolist()
        yield call


def check(call, result):
    """The checksum model is certain: the next token has log-probability 0, each id upwards GAP less."""
    prompt, meta = call["input_ids"], result["meta_info"]
    tokens = oracle(prompt, call["sampling_params"]["max_new_tokens"])
    if meta["finish_reason"]["type"] == "abort":
        tokens = tokens[: len(result["output_ids"])]
    assert result["output_ids"] == tokens
    if not call["return_logprob"]:
        assert not any(name.endswith("logprobs") for name in meta)
        return
    assert meta["output_token_logprobs"] == [(0.0, t, None) for t in tokens]
    if not tokens and meta["finish_reason"]["type"] == "abort":
        return
    start, places = call["logprob_start_len"], tokens or oracle(prompt, 1)
    told = 0 if start == -1 else len(prompt) - start
    assert [t for _, t, _ in meta["input_token_logprobs"]] == prompt[len(prompt) - told :]
    if top := call["top_logprobs_num"]:
        assert meta["output_top_logprobs"] == [[(-GAP * j, (t + j) % 1000, None) for j in range(top)] for t in places]
        assert len(meta["input_top_logprobs"]) == told
    if ids := call["token_ids_logprob"]:
        assert meta["output_token_ids_logprobs"] == [[(-GAP * ((i - t) % 1000), i, None) for i in ids] for t in places]
        assert len(meta["input_token_ids_logprobs"]) == told


@pytest.mark.parametrize("loop", ["overlap", "normal"])
@pytest.mark.slow
def test_h15_serving_recompile(runner, loop):
    compiles = []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            compiles.append(event)

    config = EngineConfig(**SETTINGS, disable_overlap_schedule=loop == "normal")
    engine = Engine.from_parts(config, model_of(module=ChecksumModel(), context_length=CONTEXT), runner, TOTAL)
    rng = np.random.default_rng(7)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        running = []
        for i, call in enumerate(random_calls(rng, 200)):
            running.append((call, engine.generate(**call, rid=str(i), stream=True)))
            for _ in range(int(rng.integers(0, 3))):
                engine._loop._turn()
            if rng.random() < 0.1:
                engine._scheduler.abort(str(int(rng.integers(0, i + 1))), exact=True)
        for call, stream in running:
            *_, last = stream
            check(call, last)
        check_all_back(engine)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert compiles == []
    buckets = runner.buckets
    assert len(runner.programs) == 2 + 4 * len(buckets.decode) + 3 * len(buckets.extend)
