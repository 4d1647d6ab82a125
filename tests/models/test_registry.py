"""Models by name, and what a directory says beside its weights."""

import json

import pytest
from helpers_models import make_hf_dir

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry


def load(path, **config):
    return registry.load(EngineConfig(model_path=str(path), **config))


def test_checksum_needs_no_files():
    loaded = load("checksum")
    assert (loaded.name, loaded.tokenizer, loaded.sampling_defaults) == ("checksum", None, {})
    assert loaded.config is loaded.module.config
    assert loaded.context_length == loaded.config.max_position_embeddings


def test_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match=r"model_path 'smollm3' is no directory.*checksum, smollm2-135m"):
        load("smollm3")


def test_unknown_architecture_lists_the_supported_ones(tmp_path):
    directory = make_hf_dir(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(CheckpointError, match=r"config.json: architectures \['GPT2LM.*LlamaFor.*MistralFor"):
        load(directory)
    with pytest.raises(CheckpointError, match=r"architectures must be a list"):
        load(make_hf_dir(tmp_path, architectures=None))


def test_directory_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        load(tmp_path)


def test_end_of_sequence_ids_of_every_file_count(tmp_path):
    """As SGLang: config.json, generation_config.json and the tokenizer each can name some."""
    directory = make_hf_dir(tmp_path, eos_token_id=[1, 7], generation={"eos_token_id": [5, 7]})
    assert load(directory).config.eos_token_ids == (1, 5, 7, 257)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    (directory / "tokenizer.json").unlink()
    loaded = load(directory)
    assert (loaded.tokenizer, loaded.module.config.eos_token_ids) == (None, (1, 7, 9))


def test_sampling_defaults(tmp_path):
    """The five that SGLang's server takes from the file (ModelConfig.get_default_sampling_params)."""
    taken = {"temperature": 0.6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
    given = {**taken, "top_k": 0, "do_sample": True, "max_length": 20, "typical_p": 0.5}
    assert load(make_hf_dir(tmp_path, generation=given)).sampling_defaults == {**taken, "top_k": -1}
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_k must be an int, not 'all'"):
        load(make_hf_dir(tmp_path, generation={"top_k": "all"}))


def test_context_length(tmp_path):
    directory = make_hf_dir(tmp_path)
    assert load(directory).context_length == 256
    assert load(directory, context_length=100).context_length == 100
    with pytest.raises(ValueError, match="context_length 257 is above the model's limit of 256"):
        load(directory, context_length=257)


def test_sliding_window_is_refused_where_it_would_matter(tmp_path):
    directory = make_hf_dir(tmp_path, architectures=["MistralForCausalLM"], sliding_window=64)
    with pytest.raises(CheckpointError, match=r"sliding_window 64 is not enforced: set context_length to at most 64"):
        load(directory)
    assert load(directory, context_length=64).context_length == 64
