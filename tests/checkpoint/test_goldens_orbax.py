"""Through Orbax the demo model and a random Qwen3 have the same weights, bit for bit, and give the same tokens."""

import numpy as np
import pytest
from helpers_models import make_hf_dir
from test_goldens import CASES, check, engine_on

from jaxoverlap.checkpoint.convert import convert
from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load
from jaxoverlap.models import registry

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": False, "dtype": "bfloat16"}


def check_same_weights(a, b):
    first, second = named_leaves(a), named_leaves(b)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        assert np.asarray(array).tobytes() == np.asarray(second[name]).tobytes(), name


@pytest.mark.soak
@pytest.mark.demo
def test_the_demo_model(tmp_path, demo_model):
    convert(demo_model, tmp_path / "orbax", registry.parameter_tree(demo_model))
    config = EngineConfig(
        model_path=str(tmp_path / "orbax"),
        dtype="float32",
        context_length=160,
        max_total_tokens=2560,
        chunked_prefill_size=128,
    )
    parts = config, *load(config)
    check_same_weights(parts[1].module, registry.load_directory(demo_model, config).module)
    for loop in ("overlap", "normal"):
        assert check(engine_on(parts, loop), CASES, len(CASES)) == 831
    parts[2].shutdown()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_random_qwen3(tmp_path, dtype):
    source = make_hf_dir(tmp_path / "hf", **QWEN3)
    convert(source, tmp_path / "orbax", registry.parameter_tree(source))
    sizes = {"context_length": 32, "max_total_tokens": 96, "max_running_requests": 2, "chunked_prefill_size": 8}
    answers, modules = [], []
    for directory in (source, tmp_path / "orbax"):
        with Engine(str(directory), dtype=dtype, skip_warmup=True, **sizes) as engine:
            params = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
            prompts = [[5, 250, 17, 3, 99, 0, 42, 8, 1, 2], [7, 1]]
            answers.append([r["output_ids"] for r in engine.generate(input_ids=prompts, sampling_params=params)])
            modules.append(engine.model.module)
    assert answers[0] == answers[1]
    check_same_weights(*modules)
