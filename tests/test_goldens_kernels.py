"""The demo model's goldens with every Pallas kernel in the path, interpreted on CPU, compiled where there is a GPU."""

import json
from pathlib import Path

import jax
import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_goldens.json").read_text())["cases"]
SHORTEST = sorted(CASES, key=lambda c: len(c["prompt_ids"]) + len(c["output_ids"]))

pytestmark = pytest.mark.demo


def agreeing(directory, kernels, cases, slots, loop="overlap"):
    """Tokens that agree with the goldens."""
    config = EngineConfig(
        model_path=str(directory),
        dtype="float32",
        context_length=160,
        max_total_tokens=160 * slots,
        page_size=16,
        max_running_requests=slots,
        chunked_prefill_size=64,
        kernels=kernels,
        skip_warmup=True,
        disable_overlap_schedule=loop == "normal",
    )
    model, runner, total = load(config)
    engine = Engine.from_parts(config, model, runner, total)
    params = {"temperature": 0.0, "max_new_tokens": 48}
    results = engine.generate(input_ids=[c["prompt_ids"] for c in cases], sampling_params=params)
    engine.wait_idle()
    runner.shutdown()
    return sum(a == b for c, r in zip(cases, results) for a, b in zip(c["output_ids"], r["output_ids"]))


@pytest.mark.slow
def test_a_short_one(demo_model):
    assert agreeing(demo_model, "interpret", SHORTEST[:1], 1) == len(SHORTEST[0]["output_ids"])


@pytest.mark.soak
def test_all_interpreted(demo_model):
    assert agreeing(demo_model, "interpret", CASES, 4) == 831


@pytest.mark.gpu
@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_all_on_a_gpu(demo_model, loop):
    assert jax.default_backend() == "gpu"
    assert agreeing(demo_model, "pallas", CASES, 16, loop) == 831
