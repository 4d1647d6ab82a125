"""Random small configs against transformers, where it is installed; test_llama.py's float64 forward needs nothing."""

import numpy as np
import pytest
from helpers_models import TINY_CONFIG, make_hf_dir
from test_llama import CASES, MOE, run_dense

from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
TYPES["Qwen3MoeForCausalLM"] = "qwen3_moe"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    compare(tmp_path, CASES[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_mixtures_of_experts_equal_transformers(tmp_path, seed):
    """Any number of experts, of which any number is chosen, in any layers."""
    rng = np.random.default_rng(seed)
    experts, layers = int(rng.integers(2, 17)), int(rng.integers(1, 5))
    compare(
        tmp_path,
        {
            **MOE,
            "num_hidden_layers": layers,
            "num_experts": experts,
            "num_experts_per_tok": int(rng.integers(1, experts + 1)),
            "moe_intermediate_size": 4 * int(rng.integers(1, 10)),  # PyTorch's grouped products want 16 bytes
            "norm_topk_prob": bool(seed % 2),
            "decoder_sparse_step": int(rng.integers(1, 3)),
            "mlp_only_layers": [i for i in range(layers) if rng.random() < 0.3],
            "hidden_size": int(rng.choice([16, 32, 48])),
            "tie_word_embeddings": bool(rng.random() < 0.5),
            "attention_bias": bool(rng.random() < 0.5),
        },
    )


def compare(directory, changes):
    """Two prompts in one batch here, one at a time there; float32."""
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = {**TINY_CONFIG, **changes}
    kind = TYPES.get(config["architectures"][0], "qwen3")
    directory = make_hf_dir(directory, seed=1, model_type=kind, **changes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    loaded = registry.load(EngineConfig(model_path=str(directory), dtype="float32"))
    prompts = [[5, 250, 17, 17, 3, 99, 0, 42, 8], [271, 1, 60]]
    with torch.no_grad():
        expected = [theirs(torch.tensor([p])).logits[0].numpy() for p in prompts]
    got = run_dense(loaded.module, prompts)[0]
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=0, atol=1e-4)
