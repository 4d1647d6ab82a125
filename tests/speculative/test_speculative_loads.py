"""Random loads on the checksum model with drafts that are always right, never, or by turns: every answer is the
oracle's in both loops, and the forwards are as many as the drafts leave to do."""

import numpy as np
import pytest
from helpers_engine import check_all_back, oracle
from helpers_speculative import RULES, RuleSpeculator, engine_on, make_runner
from test_engine_jax import random_load, run_load

from jaxoverlap.speculative.ngram import NgramSpeculator

SETTINGS = [
    {},
    {"max_running_requests": 2},
    {"chunked_prefill_size": 16, "schedule_policy": "lpm"},
    {"disable_radix_cache": True, "schedule_policy": "lof"},
    {"disable_consecutive_prefill_overlap": True, "schedule_policy": "dfs-weight"},
    {"schedule_policy": "random", "overrun": "skip-known"},
    {"init_new_token_ratio": 0.05, "retract_decode_steps": 2, "total": 80},
]
LENGTHS = {80: (12, 40), 144: (12, 40)}  # prompt and output, by pool; outputs that outgrow the pool


CASES = [(page, name) for page in (1, 4, 16) for name in (*RULES, "ngram")]
FEW, MANY = len(SETTINGS), 29 * len(SETTINGS)  # 7 and 203
LOADS = [
    (4, "mixed", FEW),
    *(pytest.param(*case, FEW, marks=pytest.mark.slow) for case in [(1, "ngram"), (1, "always"), (16, "never")]),
    *(pytest.param(*case, MANY, marks=pytest.mark.soak) for case in CASES),
]


def verify_steps(name, prompt_len, n, tokens=4):
    """Of a request that is never put back, to its output token n: the prefill gives one, each step the drafts up to the
    first wrong one and the token behind them."""
    done, steps = 1, 0
    while done < n:
        last = prompt_len + done - 1
        done += next((i for i in range(1, tokens) if not RULES[name](last + i)), tokens)
        steps += 1
    return steps


@pytest.mark.parametrize(("page", "name", "loads"), LOADS)
def test_random_loads(page, name, loads):
    speculator = NgramSpeculator(4) if name == "ngram" else RuleSpeculator(4, RULES[name])
    runner = make_runner(speculator, page_size=page)
    compiled = runner.compiles
    aborted = counted = 0
    for seed in range(loads):
        settings = {"page_size": page, **SETTINGS[seed % len(SETTINGS)]}
        total = settings.pop("total", 320)
        total = 144 if total < 144 and page == 16 else total
        load = random_load(np.random.default_rng(1000 * page + seed), *LENGTHS.get(total, (80, 20)))
        outputs = {}
        for loop in ("overlap", "normal"):
            engine = engine_on(runner, loop, total=total, **settings)
            results = run_load(engine, load)
            undisturbed = name in RULES and engine.metrics()["retracted"] == 0
            for (_, prompt, _, abort, want), result in zip(load, results):
                got, reason = result["output_ids"], result["meta_info"]["finish_reason"]
                if reason["type"] == "abort":
                    assert abort is not None, reason
                    assert got == want[: len(got)], seed
                    aborted += 1
                else:
                    assert got == want, seed
                    if undisturbed:
                        steps = result["meta_info"].get("spec_verify_ct", 0)
                        assert steps == verify_steps(name, len(prompt), len(got)), seed
                        counted += 1
            outputs[loop] = [r["output_ids"] for r, one in zip(results, load) if one[3] is None]
            check_all_back(engine)
        assert outputs["overlap"] == outputs["normal"]
    assert runner.compiles == compiled
    assert aborted > 0
    assert counted > 0 or name == "ngram"
    runner.shutdown()


@pytest.mark.parametrize("tokens", [4, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 6))])
@pytest.mark.parametrize(("name", "gain"), [("always", 1), pytest.param("never", 0, marks=pytest.mark.slow)])
def test_number_of_forwards(tokens, name, gain):
    """One prefill gives a token, each verify step `tokens` or one; with overlap the step in flight at the end is one
    more."""
    runner = make_runner(RuleSpeculator(tokens, RULES[name]), speculative_num_draft_tokens=tokens)
    for loop in ("normal", "overlap"):
        for n in (2, 9, 24):
            engine = engine_on(runner, loop, speculative_num_draft_tokens=tokens)
            prompt = [5, 6, 7]
            result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": n, "temperature": 0.0})
            assert result["output_ids"] == oracle(prompt, n)
            engine.wait_idle()
            steps = -(-(n - 1) // (tokens if gain else 1))
            assert engine.metrics()["launches"] == 1 + steps + (loop == "overlap")
            meta = result["meta_info"]
            assert meta["spec_verify_ct"] == steps
            assert meta["spec_accept_length"] == n / steps
            assert meta["spec_accept_rate"] == gain
            assert meta["spec_accept_histogram"] == [0] * (tokens - 1) * gain + [steps] + [0] * (tokens - 1) * (
                1 - gain
            )
            assert meta["spec_accept_rates"] == [gain] * (tokens - 1)
            check_all_back(engine)
    runner.shutdown()


@pytest.mark.gpu
def test_on_a_gpu():
    """Kernels and all: the oracle's tokens with drafts that are right by turns, in both loops."""
    runner = make_runner(RuleSpeculator(4, RULES["mixed"]), page_size=16)
    for loop in ("overlap", "normal"):
        load = random_load(np.random.default_rng(3), 80, 20)
        engine = engine_on(runner, loop, page_size=16)
        for (_, _, _, abort, want), result in zip(load, run_load(engine, load)):
            got = result["output_ids"]
            assert got == (want if abort is None else want[: len(got)])
        check_all_back(engine)
    runner.shutdown()
