"""Nothing piles up over many turns with arrivals, finishes and aborts, on the simulated device."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from helpers_engine import check_all_back

from jaxoverlap import Engine
from jaxoverlap.calls import Call, Ticket
from jaxoverlap.core import Batch, Launch, Request, StepResult
from jaxoverlap.device.simulated import Handle

KEPT = (Request, Ticket, Call, Launch, Batch, StepResult, Handle)


def engine(**settings):
    settings = {"max_running_requests": 8, "context_length": 96, "max_total_tokens": 160, "random_seed": 0, **settings}
    return Engine(device="simulated", step_ms=0.0, chunked_prefill_size=32, init_new_token_ratio=0.05, **settings)


def work(engine, turns, rng):
    """Calls of random requests, some given up half way, until that many turns have been made."""
    end = engine.metrics()["turns"] + turns
    while engine.metrics()["turns"] < end:
        count = int(rng.integers(1, 24))
        prompts = [rng.integers(3, 900, rng.integers(1, 24)).tolist() for _ in range(count)]
        params = [{"max_new_tokens": int(rng.integers(1, 70)), "temperature": 0.0} for _ in range(count)]
        give_up = int(rng.integers(1, 60)) if rng.random() < 0.6 else None
        logprobs = bool(rng.random() < 0.3)
        stream = engine.generate(input_ids=prompts, sampling_params=params, stream=True, return_logprob=logprobs)
        for i, _ in enumerate(stream):
            if i == give_up:
                stream.close()


def left_behind():
    gc.collect()
    return {t.__name__: sum(type(o) is t for o in gc.get_objects()) for t in KEPT}


@pytest.mark.parametrize(
    "off",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.soak)],
    ids=["overlap", "normal"],
)
def test_no_request_or_launch_stays_behind(off):
    before = left_behind()
    rng = np.random.default_rng(0)
    with engine(disable_overlap_schedule=off, audit=True) as e:
        work(e, 1500, rng)
        m = e.metrics()
        assert m["aborted"] > 0
        assert m["retracted"] > 0
        check_all_back(e)
        first = left_behind()
        work(e, 3000, rng)
        check_all_back(e)
        assert left_behind() == first
        # what the scheduler itself holds on to: its empty running batch, and the last launch
        assert {name: first[name] - before[name] for name in first if first[name] != before[name]}.keys() <= {
            "Batch", "Launch", "Request",
        }  # fmt: skip
        pages = e._scheduler.kv.pages
        assert sorted(pages.free_pages().tolist()) == list(range(1, 161))


def resident():
    """Bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' /proc")
def test_memory_is_flat_over_100_000_turns():
    rng = np.random.default_rng(1)
    with engine() as e:
        work(e, 10_000, rng)
        gc.collect()
        before = resident()
        work(e, 100_000, rng)
        check_all_back(e)
        gc.collect()
        assert resident() <= 1.02 * before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' /proc")
def test_memory_is_flat_over_500_requests_with_logprobs():
    """On JAX; the right outcome of H15 for memory."""
    rng = np.random.default_rng(2)
    settings = {"max_running_requests": 8, "context_length": 96, "max_total_tokens": 600, "chunked_prefill_size": 32}
    settings["max_logprobs"] = 8
    with Engine("checksum", **settings) as e:

        def serve(count):
            prompts = [rng.integers(3, 900, rng.integers(1, 64)).tolist() for _ in range(count)]
            params = [{"max_new_tokens": int(rng.integers(1, 20)), "temperature": float(i % 2)} for i in range(count)]
            asked = {
                "logprob_start_len": [int(rng.integers(-1, len(p) + 1)) for p in prompts],
                "top_logprobs_num": rng.integers(0, 9, count).tolist(),
                "token_ids_logprob": [rng.integers(0, 900, rng.integers(0, 9)).tolist() for _ in range(count)],
            }
            e.generate(input_ids=prompts, sampling_params=params, return_logprob=True, **asked)
            gc.collect()
            return resident()

        serve(200)
        before, compiles = serve(200), e.runner.compiles
        assert serve(500) <= 1.02 * before
        assert e.runner.compiles == compiles
