"""Random small configs against transformers, where it is installed; test_llama.py's float64 forward needs nothing."""

import numpy as np
import pytest
from helpers_models import TINY_CONFIG, make_hf_dir
from test_llama import CASES, run_dense

from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
TYPES["Qwen3MoeForCausalLM"] = "qwen3_moe"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = {**TINY_CONFIG, **CASES[name]}
    kind = TYPES.get(config["architectures"][0], "qwen3")
    directory = make_hf_dir(tmp_path, seed=1, model_type=kind, **CASES[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded = registry.load(EngineConfig(model_path=str(directory), dtype="float32"))
    prompts = [[5, 250, 17, 17, 3, 99, 0, 42, 8], [271, 1, 60]]
    with torch.no_grad():
        expected = [theirs(torch.tensor([p])).logits[0].numpy() for p in prompts]
    got = run_dense(loaded.module, prompts)[0]
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=0, atol=1e-4)
