"""EngineConfig: what is accepted is enforced, what is not is refused by name."""

import numpy as np
import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.sampling_params import SamplingParams

NGRAM = {"speculative_algorithm": "NGRAM"}
EAGLE3 = {"speculative_algorithm": "EAGLE3"}
LAYERS = {"speculative_algorithm": "STANDALONE", "speculative_draft_layers": 2}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"page_size": 0}, ["page_size", "1"]),
        ({"page_size": 3}, ["chunked_prefill_size", "page_size 3"]),
        ({"max_total_tokens": 10, "page_size": 4}, ["max_total_tokens", "page_size 4"]),
        ({"stream_interval": 1 << 31}, ["stream_interval", "2147483647"]),
        ({"schedule_conservativeness": float("nan")}, ["schedule_conservativeness", "finite"]),
        ({"schedule_policy": "sjf"}, ["schedule_policy", "fcfs"]),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": -1}, ["enable_mixed_chunk", "chunked_prefill_size"]),
        ({"enable_priority_scheduling": True, "schedule_policy": "lpm"}, ["enable_priority_scheduling", "lpm"]),
        ({"schedule_low_priority_values_first": True}, ["schedule_low_priority_values_first", "enable_priority"]),
        ({"priority_scheduling_preemption_threshold": 3}, ["threshold", "enable_priority_scheduling"]),
        ({"disable_priority_preemption": True}, ["disable_priority_preemption", "enable_priority_scheduling"]),
        ({"random_seed": -1}, ["random_seed", "0"]),
        ({"grammar_backend": "xgrammar"}, ["grammar_backend", "llguidance, none", "xgrammar"]),
        ({"grammar_timeout": 0}, ["grammar_timeout", "above 0"]),
        ({"constrained_json_whitespace_pattern": "x?"}, ["constrained_json_whitespace_pattern", "'x?'"]),
        ({"constrained_json_whitespace_pattern": "\\s*"}, ["constrained_json_whitespace_pattern"]),
        ({"constrained_json_whitespace_pattern": "1"}, ["constrained_json_whitespace_pattern"]),
        ({"delay_sampling": "never"}, ["delay_sampling", "sglang, when-needed"]),
        ({"speculative_algorithm": "MEDUSA"}, ["speculative_algorithm", "NGRAM", "MEDUSA"]),
        ({"speculative_num_draft_tokens": 4}, ["speculative_num_draft_tokens needs speculative_algorithm"]),
        ({"speculative_draft_layers": 4}, ["speculative_draft_layers needs speculative_algorithm STANDALONE"]),
        ({**NGRAM, "speculative_num_steps": 3}, ["speculative_num_steps needs speculative_algorithm STANDALONE"]),
        (
            {"speculative_grammar_overlap": True},
            ["speculative_grammar_overlap needs", "EAGLE3, not none"],
        ),
        ({**NGRAM, "speculative_num_draft_tokens": 1}, ["speculative_num_draft_tokens", "2 to 32", "not 1"]),
        ({**NGRAM, "speculative_eagle_topk": 4}, ["speculative_eagle_topk must be 1", "not 4"]),
        ({**NGRAM, "enable_mixed_chunk": True}, ["enable_mixed_chunk", "speculation"]),
        ({**NGRAM, "deterministic": True}, ["deterministic", "speculation"]),
        ({**NGRAM, "device": "simulated"}, ["speculative_algorithm", "simulated"]),
        ({"speculative_algorithm": "STANDALONE"}, ["speculative_draft_model_path", "speculative_draft_layers"]),
        ({**LAYERS, "speculative_draft_model_path": "x"}, ["one of speculative_draft_model_path"]),
        ({**LAYERS, "speculative_draft_layers": 0}, ["speculative_draft_layers", "at least 1"]),
        ({**LAYERS, "speculative_num_steps": 3, "speculative_num_draft_tokens": 3}, ["draft_tokens 3", "steps 3 + 1"]),
        (EAGLE3, ["EAGLE3 needs speculative_draft_model_path"]),
        (
            {**EAGLE3, "speculative_draft_layers": 2},
            ["speculative_draft_layers needs speculative_algorithm STANDALONE"],
        ),
        ({**EAGLE3, "speculative_draft_model_path": "x", "speculative_eagle_topk": 2}, ["speculative_eagle_topk", "1"]),
        ({**EAGLE3, "speculative_num_steps": 4, "speculative_num_draft_tokens": 8}, ["draft_tokens 8", "steps 4 + 1"]),
    ],
)
def test_refused(settings, parts):
    with pytest.raises(ValueError) as e:  # noqa: PT011
        EngineConfig(**settings)
    for part in parts:
        assert part in str(e.value)


def test_numbers_of_drafts():
    assert EngineConfig(**NGRAM).speculative_num_draft_tokens == 4
    for given in ({}, {"speculative_num_steps": 3}, {"speculative_num_draft_tokens": 4}):
        config = EngineConfig(**LAYERS, **given)
        assert (config.speculative_num_steps, config.speculative_num_draft_tokens) == (3, 4)
        assert config.verify_reserve == 8  # SGLang: twice the drafts


@pytest.mark.parametrize("pattern", ["", " ?", "[ ]?", "[ \\t\\n\\r]*", "[ \n]{0,4}", "( |\\n)+"])
def test_patterns_of_white_space(pattern):
    assert EngineConfig(constrained_json_whitespace_pattern=pattern).grammar_backend == "llguidance"


def test_an_unknown_variable_is_named():
    with pytest.raises(ValueError, match="JAXOVERLAP_PAGE_SIZES"):
        EngineConfig.check_environment({"JAXOVERLAP_PAGE_SIZES": "4"})
    with pytest.raises(ValueError, match="JAXOVERLAP_PAGE_SIZE: 'four' is no int"):
        EngineConfig.check_environment({"JAXOVERLAP_PAGE_SIZE": "four"})


def test_numpy_numbers_are_numbers():
    params = SamplingParams(
        max_new_tokens=np.int64(4), temperature=np.float32(0.5), top_k=np.int32(3), ignore_eos=np.bool_(True)
    )
    assert params == SamplingParams(max_new_tokens=4, temperature=0.5, top_k=3, ignore_eos=True)
    assert EngineConfig(page_size=np.int64(2)).page_size == 2
