"""A tiny GGUF file, written from a checkpoint's tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from helpers_models import TINY_CONFIG, tiny_weights

TYPES = gguf.GGMLQuantizationType
TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>", *"abcd", "ab", "Ġ", "cd", "abcd", "1", "2", "12"]
CONTROL = 3
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection in GGUF's order: within a head, row i + D/2 follows row i."""
    size = len(weight) // heads
    order = [h * size + i + half * size // 2 for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def gguf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[kind]}.weight"


def write_gguf(
    path: Path, config: dict[str, Any], *, quantised: bool = False, architecture: str = "llama", **strings: Any
) -> dict[str, np.ndarray]:
    """Writes a model with random weights and gives them by checkpoint name; `quantised`: projections as Q8_0."""
    config = {**TINY_CONFIG, "vocab_size": len(TOKENS), **config}
    weights = tiny_weights(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model(strings.get("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(strings.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d", "ab cd", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    if "extra_tensor" in strings:
        writer.add_tensor(strings["extra_tensor"], np.zeros((4,), np.float32))
    for name, weight in weights.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        stored = neighbours(weight, config[heads]) if heads else weight
        if quantised and weight.ndim == 2 and weight.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name(name), quantize(stored, TYPES.Q8_0), raw_dtype=TYPES.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
