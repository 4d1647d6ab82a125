"""A model by name: 'checksum', a demo model, or a directory of Hugging Face's or Orbax' format."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fetch import DEMO_MODELS, fetch
from jaxoverlap.checkpoint.fields import Fields
from jaxoverlap.checkpoint.load import Place, load_parameters, read_parameters
from jaxoverlap.checkpoint.replace import partial_of
from jaxoverlap.checkpoint.tree import ParameterTree
from jaxoverlap.config import EngineConfig
from jaxoverlap.kernels.backend import Kernels
from jaxoverlap.loading import ServedModel
from jaxoverlap.models.checksum import ChecksumModel
from jaxoverlap.models.decoder import IGNORED_TENSORS, Decoder
from jaxoverlap.models.layers import DecoderConfig
from jaxoverlap.models.llama import llama_config, mistral_config
from jaxoverlap.models.qwen3 import qwen2_config, qwen3_config
from jaxoverlap.models.qwen3_moe import qwen3_moe_config
from jaxoverlap.models.sharding import ALONE
from jaxoverlap.progress import Report
from jaxoverlap.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxoverlap.parallel.mesh import RankMesh

ARCHITECTURES: dict[str, Callable[[Fields, str], DecoderConfig]] = {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
    "Qwen3MoeForCausalLM": qwen3_moe_config,
}
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the runner. `config` is the module's; `context_length` in tokens.

    `sampling_defaults` holds those fields of SamplingParams that generation_config.json states.
    """

    name: str
    module: Any
    config: Any
    tokenizer: Tokenizer | None
    context_length: int
    sampling_defaults: dict[str, Any]


def load(config: EngineConfig, *, mesh: RankMesh | None = None, progress: Report | None = None) -> LoadedModel:
    """`mesh`: the ranks that share the weights. Raises CheckpointError, FetchError or ValueError naming the file, the
    field, or the setting and its limit."""
    name = config.model_path
    if name == "checksum":
        module = ChecksumModel()
        return LoadedModel(name, module, module.config, None, _context_length(config, module.config), {})
    loaded = load_directory(directory_of(name, progress=progress), config, mesh=mesh, progress=progress)
    return loaded if Path(name).is_dir() else dataclasses.replace(loaded, name=name)


def directory_of(name: str, *, progress: Report | None = None) -> Path:
    """The directory of a model that has weights; a demo model is fetched."""
    if Path(name).is_dir():
        return Path(name)
    if name in DEMO_MODELS:
        return fetch(name, progress=progress)
    if (left := partial_of(Path(name))).is_dir():
        raise CheckpointError(f"{name} is not there: its save was interrupted, and {left} is no whole checkpoint")
    raise ValueError(f"model_path {name!r} is no directory, and not one of: checksum, {', '.join(DEMO_MODELS)}")


def load_directory(
    directory: Path,
    config: EngineConfig,
    *,
    sharding: Place | None = None,
    mesh: RankMesh | None = None,
    progress: Report | None = None,
) -> LoadedModel:
    """config.json and weights of a directory, and where present tokenizer.json and generation_config.json.
    `sharding`: where each parameter goes, see checkpoint/load.py; or a `mesh` of ranks, each with its share."""
    fields = Fields.read(directory / "config.json")
    model_config = _architecture(fields)(fields, _dtype(config.dtype, fields))
    context_length = _context_length(config, model_config)
    tokenizer = Tokenizer.from_dir(directory) if (directory / "tokenizer.json").exists() else None
    eos, defaults = generation_defaults(directory)
    eos = {*model_config.eos_token_ids, *eos}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    model_config = dataclasses.replace(model_config, eos_token_ids=tuple(sorted(eos)))
    kernels = Kernels.choose(config.kernels, jax.default_backend())
    ranks, put = ALONE, None
    if mesh is not None:
        ranks, put = mesh.ranks, mesh.placing(nnx.eval_shape(lambda: Decoder(model_config)))
    module = load_parameters(
        lambda: Decoder(model_config, kernels, ranks),
        directory,
        ignored=IGNORED_TENSORS,
        sharding=sharding,
        put=put,
        progress=progress,
    )
    return LoadedModel(directory.name, module, model_config, tokenizer, context_length, defaults)


def parameter_tree(directory: Path) -> ParameterTree:
    """What the model of a directory's config.json is made of, in float32."""
    fields = Fields.read(directory / "config.json")
    config = _architecture(fields)(fields, "float32")
    return ParameterTree.of(lambda: Decoder(config))


def read_weights(
    model: ServedModel, path: str | os.PathLike[str], *, progress: Report | None = None
) -> dict[str, np.ndarray]:
    """Other weights for a loaded model, on the host, by parameter. Raises ValueError for a model without any, and
    CheckpointError where the directory's config.json describes another model, naming the field."""
    if not isinstance(model.config, DecoderConfig):
        raise ValueError(f"model {model.name} has no weights to update")
    directory = directory_of(os.fspath(path), progress=progress)
    fields = Fields.read(directory / "config.json")
    config = _architecture(fields)(fields, model.config.dtype)
    for field in dataclasses.fields(DecoderConfig):
        there, served = getattr(config, field.name), getattr(model.config, field.name)
        if field.name != "eos_token_ids" and there != served:
            raise CheckpointError(f"{fields.source}: {field.name} is {there}, the served model's is {served}")
    return read_parameters(lambda: Decoder(config), directory, ignored=IGNORED_TENSORS, progress=progress)


def generation_defaults(directory: Path) -> tuple[set[int], dict[str, Any]]:
    """(end-of-sequence ids, sampling defaults) of generation_config.json, as far as the file states them."""
    path = directory / "generation_config.json"
    if not path.exists():
        return set(), {}
    fields = Fields.read(path)
    defaults: dict[str, Any] = {}
    for name in SAMPLING_DEFAULTS:
        value = fields.integer(name, None, low=-1) if name == "top_k" else fields.number(name, None)
        if value is not None:
            defaults[name] = -1 if name == "top_k" and value == 0 else value
    return set(fields.ids("eos_token_id")), defaults


def _architecture(fields: Fields) -> Callable[[Fields, str], DecoderConfig]:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names:
        raise fields.error("architectures", "must be a list with the model's class")
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise fields.error("architectures", f"{names} is not supported (only {', '.join(ARCHITECTURES)})")


def _dtype(choice: str, fields: Fields) -> str:
    if choice != "auto":
        return choice
    if jax.default_backend() == "cpu":
        return "float32"
    name = "dtype" if "dtype" in fields else "torch_dtype"
    stored = fields.text(name, "float32")
    if stored not in ("bfloat16", "float32"):
        raise fields.error(name, f"{stored!r} is not computed in: set the setting dtype to bfloat16 or float32")
    return stored


def _context_length(config: EngineConfig, model: Any) -> int:
    limit = model.max_position_embeddings
    length = config.context_length or limit
    if length > limit:
        raise ValueError(f"context_length {length} is above the model's limit of {limit}")
    window = getattr(model, "sliding_window", None)
    if window is not None and window < length:
        raise CheckpointError(
            f"sliding_window {window} is not enforced: set context_length to at most {window} (it is {length})"
        )
    return length
