"""From a configuration to its speculator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.pool import CacheShapes
from jaxoverlap.device.verify import Speculator
from jaxoverlap.models import registry
from jaxoverlap.models.decoder import Decoder
from jaxoverlap.models.eagle3 import load_eagle3
from jaxoverlap.progress import Report
from jaxoverlap.speculative.draft import DraftModelSpeculator, FirstLayersSpeculator
from jaxoverlap.speculative.eagle import Eagle3Speculator
from jaxoverlap.speculative.ngram import NgramSpeculator


def load_speculator(
    config: EngineConfig, model: registry.LoadedModel, *, progress: Report | None = None
) -> Speculator | None:
    """None without speculation. Raises ValueError for a draft that does not fit the model, naming the setting."""
    if config.speculative_algorithm == "none":
        return None
    tokens = config.speculative_num_draft_tokens
    if config.speculative_algorithm == "NGRAM":
        return NgramSpeculator(tokens)
    if config.speculative_algorithm == "EAGLE3":
        return _eagle3(config, model, progress)
    if (layers := config.speculative_draft_layers) is not None:
        if not isinstance(model.module, Decoder):
            raise ValueError(f"speculative_draft_layers {layers}: model {model.name} has no layers")
        if layers >= model.config.num_layers:
            raise ValueError(
                f"speculative_draft_layers {layers} must be below the {model.config.num_layers} layers of the model"
            )
        return FirstLayersSpeculator(layers, tokens)
    assert config.speculative_draft_model_path is not None
    settings: dict[str, Any] = {"model_path": config.speculative_draft_model_path, "context_length": None}
    draft = registry.load(dataclasses.replace(config, **settings), progress=progress)
    for name, limit in (("vocab_size", model.config.vocab_size), ("max_position_embeddings", model.context_length)):
        value = getattr(draft.config, name)
        if value != limit if name == "vocab_size" else value < limit:
            raise ValueError(f"speculative_draft_model_path {draft.name}: {name} {value}, the model needs {limit}")
    return DraftModelSpeculator(draft.module, tokens)


def _eagle3(config: EngineConfig, model: registry.LoadedModel, progress: Report | None) -> Eagle3Speculator:
    path = config.speculative_draft_model_path
    assert path is not None
    if not isinstance(model.module, Decoder):
        raise ValueError(f"speculative_algorithm EAGLE3: model {model.name} has no layers for a head to read")
    if not Path(path).is_dir():
        raise ValueError(f"speculative_draft_model_path {path!r} is no directory of an EAGLE-3 head")
    head, layers = load_eagle3(Path(path), model.config, progress=progress)
    return Eagle3Speculator(head, layers, config.speculative_num_draft_tokens)


def all_caches(model: Any, speculator: Speculator) -> CacheShapes:
    """The caches of the model and its draft, and the history, in place of the model's `cache_shapes`."""

    def shapes(num_locs: int) -> Sequence[jax.ShapeDtypeStruct]:
        draft = () if speculator.draft is None else speculator.draft.cache_shapes(num_locs)
        return (*model.cache_shapes(num_locs), *draft, jax.ShapeDtypeStruct((num_locs,), jnp.int32))

    return shapes
