"""The EAGLE-3 draft head (SGLang's LlamaForCausalLMEagle3): one decoder layer over what a target computed.

Place p of the head takes the token at p + 1 beside the hidden state of p: the target's, of three of its layers reduced
to one, or for a drafted token the head's own output at the place before. It predicts the token at p + 2. Its keys and
values are kept where the target keeps those of position p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.checkpoint.hf import Checkpoint
from jaxoverlap.checkpoint.load import load_parameters
from jaxoverlap.checkpoint.parts import Part, Parts, nested
from jaxoverlap.models.decoder import Decoder, decoder_config
from jaxoverlap.models.layers import Attention, Cache, DecoderConfig, GatedMLP, Linear, RMSNorm, matmul
from jaxoverlap.progress import Report

ARCHITECTURE = "LlamaForCausalLMEagle3"
EMBEDDING, IDS = "embed_tokens.weight", "d2t"
IGNORED_TENSORS = r"t2d|(.*\.)?rotary_emb\.inv_freq"  # t2d: which ids the drafts' vocabulary has, as d2t says too
NO_DRAFT = -1e9  # logit of an id that the head has not; finite, so that a mask may leave nothing else


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """`layers`: those of the target whose inputs the head takes, in order. `own_embedding`: else the target's is used.
    `remapped`: the drafts' ids are not the target's."""

    decoder: DecoderConfig  # vocab_size is the target's
    draft_vocab_size: int
    layers: tuple[int, ...]
    own_embedding: bool
    remapped: bool


class Eagle3Head(nnx.Module):
    """Of a target with the same vocabulary. Parameters start at zero, as a Decoder's do."""

    def __init__(self, config: Eagle3Config, target_size: int) -> None:
        c = config.decoder
        self.config = c
        self.reduce = Linear(len(config.layers) * target_size, [c.hidden_size], False, c.dtype)
        self.embedding_norm, self.hidden_norm, self.mlp_norm, self.norm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps, c.dtype) for _ in range(4)
        )
        self.attention = Attention(c, 2 * c.hidden_size)
        self.mlp = GatedMLP(c)
        self.embedding = _table(c.vocab_size, c) if config.own_embedding else None
        self.head = None if c.tie_word_embeddings else _table(config.draft_vocab_size, c)
        self.offsets = nnx.Param(jnp.zeros((config.draft_vocab_size,), jnp.int32)) if config.remapped else None

    def cache_shapes(self, num_locs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """k and v, each [num_locs, KV heads, head size]."""
        c = self.config
        shape = jax.ShapeDtypeStruct((num_locs, c.num_kv_heads, c.head_dim), jnp.dtype(c.dtype))
        return shape, shape

    def reduced(self, captured: Sequence[jax.Array]) -> jax.Array:
        """The target's hidden states, [T, its hidden size] a layer -> [T, hidden]."""
        return self.reduce(jnp.concatenate(captured, axis=-1).astype(self.config.dtype))[0]

    def __call__(
        self, target: Decoder, ids: jax.Array, hidden: jax.Array, context: Any, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """int32 ids [T] of the tokens behind the places of `context`, hidden [T, hidden] of those places -> the same
        of the next ones (not normed), and the cache with the places' keys and values written."""
        embedded = (target.embed(ids) if self.embedding is None else self.embedding[...][ids]).astype(hidden.dtype)
        x = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        y, cache = self.attention(x, self.config.rope.angles(context.positions), context, cache, 0)
        hidden = hidden + y
        return hidden + self.mlp(self.mlp_norm(hidden)), cache

    def logits(self, target: Decoder, hidden: jax.Array) -> jax.Array:
        """[B, hidden] -> float32 [B, the target's vocabulary], NO_DRAFT where the head has no such id."""
        table = target.embedding if self.embedding is None else self.embedding
        logits = matmul(self.norm(hidden), (table if self.head is None else self.head)[...], jnp.float32)
        if self.offsets is None:
            return logits
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + self.offsets[...]
        out = jnp.full((logits.shape[0], self.config.vocab_size), NO_DRAFT, jnp.float32)
        return out.at[:, ids].set(logits, unique_indices=True)

    def parts(self) -> Parts:
        """The checkpoint's tensors by parameter."""
        at = "midlayer"
        parts = nested("reduce", self.reduce.parts(["fc"]))
        parts |= nested("embedding_norm", self.embedding_norm.parts(f"{at}.input_layernorm"))
        parts |= nested("hidden_norm", self.hidden_norm.parts(f"{at}.hidden_norm"))
        parts |= nested("attention", self.attention.parts(f"{at}.self_attn"))
        parts |= nested("mlp_norm", self.mlp_norm.parts(f"{at}.post_attention_layernorm"))
        parts |= nested("mlp", self.mlp.parts(f"{at}.mlp"))
        parts |= nested("norm", self.norm.parts("norm"))
        for path, name in (("embedding", EMBEDDING), ("head", "lm_head.weight"), ("offsets", IDS)):
            if getattr(self, path) is not None:
                parts[path] = (Part(name),)
        return parts

    def duplicates(self) -> dict[str, str]:
        """As Decoder.duplicates."""
        return {"lm_head.weight": EMBEDDING} if self.head is None and self.embedding is not None else {}


def _table(rows: int, config: DecoderConfig) -> nnx.Param:
    return nnx.Param(jnp.zeros((rows, config.hidden_size), config.dtype))


def load_eagle3(
    directory: Path, target: DecoderConfig, *, progress: Report | None = None
) -> tuple[Eagle3Head, tuple[int, ...]]:
    """The head of a Hugging Face directory, computed in the target's dtype, and the target's layers that it takes.
    Raises CheckpointError naming the field or the tensor that is missing, wrong, or does not fit the target."""
    fields = Fields.read(directory / "config.json")
    with Checkpoint(directory) as checkpoint:
        config = eagle3_config(fields, target, frozenset(checkpoint.where))
    head: Eagle3Head = load_parameters(
        lambda: Eagle3Head(config, target.hidden_size), directory, ignored=IGNORED_TENSORS, progress=progress
    )
    if head.offsets is not None:
        ids = np.arange(config.draft_vocab_size) + np.asarray(head.offsets[...])
        if ids.min() < 0 or ids.max() >= target.vocab_size or len(np.unique(ids)) < len(ids):
            raise CheckpointError(f"{directory}: tensor {IDS} does not name ids of the {target.vocab_size}, each once")
    return head, config.layers


def eagle3_config(fields: Fields, target: DecoderConfig, tensors: frozenset[str]) -> Eagle3Config:
    """config.json of a head whose checkpoint holds `tensors`. Raises CheckpointError naming the field."""
    names = fields.values.get("architectures")
    if names != [ARCHITECTURE]:
        raise fields.error("architectures", f"{names!r} is no EAGLE-3 head (only [{ARCHITECTURE!r}])")
    fields.refuse_unless("num_hidden_layers", 1)
    for name in ("attention_bias", "mlp_bias", "bias"):
        fields.refuse_unless(name, False)
    decoder = dataclasses.replace(decoder_config(fields, target.dtype), num_layers=1)
    if decoder.vocab_size != target.vocab_size:
        raise fields.error("vocab_size", f"is {decoder.vocab_size}, the target's {target.vocab_size}")
    name = "target_hidden_size" if "target_hidden_size" in fields else "hidden_size"
    if (size := fields.integer(name)) != target.hidden_size:
        raise fields.error(name, f"is {size}, the target's hidden size {target.hidden_size}")
    drafts = fields.integer("draft_vocab_size", decoder.vocab_size)
    if drafts > decoder.vocab_size or (decoder.tie_word_embeddings and drafts < decoder.vocab_size):
        raise fields.error("draft_vocab_size", f"{drafts} does not go with vocab_size {decoder.vocab_size}")
    return Eagle3Config(
        decoder,
        draft_vocab_size=drafts,
        layers=_layers(fields, target.num_layers),
        own_embedding=EMBEDDING in tensors or decoder.hidden_size != target.hidden_size,
        remapped=IDS in tensors or drafts < decoder.vocab_size,
    )


def _layers(fields: Fields, count: int) -> tuple[int, ...]:
    """SGLang's: in front of layers 2, n // 2 and n - 3 of n, or behind those that `eagle_config` names."""
    group = fields.group("eagle_config") or Fields({}, fields.source)
    group.refuse_unless("use_aux_hidden_state", True)
    stated = group.indices("eagle_aux_hidden_state_layer_ids")
    layers = tuple(i + 1 for i in stated) or (2, count // 2, count - 3)
    if len(set(layers)) != 3 or not all(0 <= i < count for i in layers):
        state = "has" if stated else "is absent, which has"
        raise fields.error("eagle_config", f"{state} the head take the inputs of layers {layers}, not three of {count}")
    return tuple(sorted(layers))
