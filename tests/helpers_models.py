"""Models for tests: a tiny random one as a Hugging Face directory, the demo model, and a cache that is not paged."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as token_models

from jaxoverlap.checkpoint.errors import FetchError
from jaxoverlap.checkpoint.fetch import fetch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
    "dtype": "float32",
}


@functools.cache
def demo_model_dir() -> Path:
    """The demo model's directory, fetched once. Skips the test where it cannot be downloaded."""
    try:
        return fetch("smollm2-135m")
    except FetchError as e:
        if "could not download" not in str(e):
            raise
        pytest.skip(f"no demo model: {e}")


def tiny_weights(config: dict[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random weights under the checkpoint names of a decoder with `config`."""
    rng = np.random.default_rng(seed)
    c = config
    qwen2 = c["architectures"] == ["Qwen2ForCausalLM"]
    moe = c["architectures"] == ["Qwen3MoeForCausalLM"]
    d, ffn, hd = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d)

    def gated(at: str, size: int) -> dict[str, tuple[int, ...]]:
        return {f"{at}.gate_proj": (size, d), f"{at}.up_proj": (size, d), f"{at}.down_proj": (d, size)}

    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        linear = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
        linear["self_attn.o_proj"] = (d, q)
        if moe and i not in c.get("mlp_only_layers", ()) and (i + 1) % c.get("decoder_sparse_step", 1) == 0:
            linear["mlp.gate"] = (c["num_experts"], d)
            for e in range(c["num_experts"]):
                linear |= gated(f"mlp.experts.{e}", c["moe_intermediate_size"])
        else:
            linear |= gated("mlp", ffn)
        for name, shape in linear.items():
            shapes[f"{at}.{name}.weight"] = shape
            if c.get("attention_bias" if "attn" in name else "mlp_bias") or (
                qwen2 and name.endswith(("q_proj", "k_proj", "v_proj"))
            ):
                shapes[f"{at}.{name}.bias"] = shape[:1]
        if moe or c["architectures"] == ["Qwen3ForCausalLM"]:
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (hd,)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (d,)

    return {name: _drawn(rng, name, shape).astype(dtype) for name, shape in shapes.items()}


def make_tokenizer(directory: Path) -> None:
    """Byte-level tokenizer without merges: 256 bytes, then <|im_start|> 256, <|im_end|> 257 (end of sequence)."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(token_models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make_hf_dir(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Writes a tiny random model (TINY_CONFIG changed by `config`) and its tokenizer; with an index if `shards` > 1."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {**TINY_CONFIG, "dtype": dtype, **config}
    weights = tiny_weights(settings, seed, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
    (directory / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    make_tokenizer(directory)
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({n: w for n, w in weights.items() if files[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


def make_eagle3_dir(
    directory: Path,
    *,
    seed: int = 0,
    layers: tuple[int, ...] | None = None,
    draft_vocab: int = 48,
    known: Sequence[int] = (),
    own_embedding: bool = False,
    leave_out: Sequence[str] = (),
    **config: Any,
) -> Path:
    """Writes a random EAGLE-3 head of a tiny model (its config: TINY_CONFIG changed by `config`). `layers`: ids of the
    target's layers behind which it reads, else SGLang's choice. Its ids are `known` and some of the target's."""
    directory.mkdir(parents=True, exist_ok=True)
    more = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    settings = {**TINY_CONFIG, **more, "draft_vocab_size": draft_vocab, **config}
    if layers is not None:
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    (directory / "config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(seed)
    d, ffn, hd, vocab = (settings[n] for n in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    q, kv = settings["num_attention_heads"] * hd, settings["num_key_value_heads"] * hd
    shapes = {"fc": (d, 3 * settings.get("target_hidden_size", d)), "lm_head": (draft_vocab, d), "norm": (d,)}
    if own_embedding:
        shapes["embed_tokens"] = (vocab, d)
    layer = {"input_layernorm": (d,), "hidden_norm": (d,), "post_attention_layernorm": (d,)}
    layer |= {"self_attn.q_proj": (q, 2 * d), "self_attn.k_proj": (kv, 2 * d), "self_attn.v_proj": (kv, 2 * d)}
    layer |= {"self_attn.o_proj": (d, q), "mlp.gate_proj": (ffn, d), "mlp.up_proj": (ffn, d), "mlp.down_proj": (d, ffn)}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    weights = {f"{name}.weight": _drawn(rng, name, shape).astype(np.float32) for name, shape in shapes.items()}
    others = rng.permutation(np.setdiff1d(np.arange(vocab), known))
    ids = np.sort([*known, *others][:draft_vocab])
    weights["d2t"] = ids - np.arange(draft_vocab)
    weights["t2d"] = np.isin(np.arange(vocab), ids)
    save_file({n: w for n, w in weights.items() if n not in leave_out}, directory / "model.safetensors")
    return directory


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        return 1 + 0.2 * rng.standard_normal(shape)
    return rng.standard_normal(shape) * (1.0 if "embed" in name else 1.5 * shape[-1] ** -0.5)


@dataclass
class DenseContext:
    """What a model needs of a batch, without pages: token t of the batch lies at location t of the cache.

    `rows` and `positions` are int32 [T]; a token attends to those of its row that are not after it.
    """

    rows: np.ndarray
    positions: np.ndarray
    mask: jax.Array = field(init=False)

    def __post_init__(self) -> None:
        same = self.rows[:, None] == self.rows[None, :]
        self.mask = jnp.asarray(same & (self.positions[:, None] >= self.positions[None, :]))  # [T, T]

    @classmethod
    def of_lengths(cls, lengths: list[int]) -> DenseContext:
        rows = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
        return cls(rows, np.concatenate([np.arange(n) for n in lengths]).astype(np.int32))

    def cache(self, model: Any) -> tuple[jax.Array, ...]:
        return tuple(jnp.full(s.shape, jnp.nan, s.dtype) for s in model.cache_shapes(len(self.rows)))

    def write(self, cache: Any, layer: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = len(self.rows)
        at = slice(layer * tokens, (layer + 1) * tokens)
        return cache[0].at[at].set(k), cache[1].at[at].set(v)

    def attend(self, q: jax.Array, cache: Any, layer: int, scale: float) -> jax.Array:
        tokens, heads = q.shape[:2]
        k, v = (x[layer * tokens : (layer + 1) * tokens] for x in cache)
        k, v = (jnp.repeat(x, heads // x.shape[1], axis=1).astype(jnp.float32) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k) * scale
        weights = jax.nn.softmax(jnp.where(self.mask, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v).astype(q.dtype)
