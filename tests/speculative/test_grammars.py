"""Grammars with speculation, tests/README.md H9: every output is that of plain decoding under the grammar."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_engine import byte_level_tokenizer, check_all_back
from helpers_speculative import RULES, RuleSpeculator, engine_on, make_runner

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))
from helpers_grammar import byte_backend
from test_engine_grammars import GRAMMARS, MODEL, check_ended, expected, params, random_load, run_load, turn

from jaxoverlap.device.verify import Speculator
from jaxoverlap.grammar.backend import LLGrammar
from jaxoverlap.models.checksum import ChecksumModel
from jaxoverlap.speculative.ngram import NgramSpeculator

CONTEXT, TOTAL, TOKENS = 160, 480, 4
FORCED = "start of a long forced run: "


class TextSpeculator(Speculator):
    """Drafts the text, token i at output i of a prompt of `prompt_len` tokens."""

    num_draft_tokens = TOKENS

    def __init__(self, text, prompt_len):
        self.ids = jnp.asarray(list(text.encode()), jnp.int32)
        self.prompt_len = prompt_len

    def propose(self, step, weights, state):
        at = step.lens - self.prompt_len + 1
        return jnp.stack([self.ids.at[at + i].get(mode="clip") for i in range(TOKENS - 1)]), state


@pytest.fixture(scope="module")
def backend():
    backend = byte_backend()
    yield backend
    backend.shutdown()


def engine(runner, backend, loop, total=TOTAL, **settings):
    served = {"model": ChecksumModel(MODEL), "tokenizer": byte_level_tokenizer(), "backend": backend}
    return engine_on(runner, loop, total=total, context=CONTEXT, **served, **settings)


PROMPT = [50, 51, 52]
SPECULATORS = {
    "right": RuleSpeculator(TOKENS, RULES["always"]),
    "illegal": TextSpeculator("}" * 4, 0),
    "ngram": NgramSpeculator(TOKENS),
    "mixed": RuleSpeculator(TOKENS, RULES["mixed"]),
    "forced": TextSpeculator(FORCED, len(PROMPT)),
    "alphabet": TextSpeculator("abcdefghijklmnopqrstuvwxyz" * 2, len(PROMPT)),
}


@pytest.fixture(scope="module")
def runner(request):
    """With the speculator of that name, "right" unless a test says another."""
    speculator = SPECULATORS[getattr(request, "param", "right")]
    runner = make_runner(speculator, model=ChecksumModel(MODEL), total=TOTAL, context=CONTEXT, cut=True)
    yield runner
    runner.shutdown()


def drafting(*names):
    return pytest.mark.parametrize("runner", names, indirect=True)


@drafting("illegal", *(pytest.param(name, marks=pytest.mark.soak) for name in ("right", "ngram")))
def test_random_loads(backend, runner):
    compiled = runner.compiles
    for seed in range(8):
        load = random_load(np.random.default_rng(seed), 60, 40)
        for loop in ("overlap", "normal"):
            served = engine(runner, backend, loop)
            results = run_load(served, load)
            for (_, prompt, sampling, abort), result in zip(load, results):
                want, got = expected(backend, prompt, sampling), result["output_ids"]
                if result["meta_info"]["finish_reason"]["type"] == "abort":
                    assert abort is not None
                    assert got == want[: len(got)]
                else:
                    assert got == want
                    check_ended(sampling, result)
            check_all_back(served)
    assert runner.compiles == compiled


@drafting("forced")
@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_a_forced_run_takes_a_step_for_each_so_many_tokens(backend, runner, loop):
    """One token from the prefill, then TOKENS a step while the drafts are the forced text; a free row beside it keeps
    its own pace."""
    served = engine(runner, backend, loop)
    sampling = params(len(FORCED), regex=FORCED + "[0-9]{2}")
    forced, free = served.generate(input_ids=[PROMPT, [60, 61, 62]], sampling_params=[sampling, params(6)])
    assert forced["text"] == FORCED
    assert forced["meta_info"]["spec_verify_ct"] == -(-(len(FORCED) - 1) // TOKENS)
    assert free["output_ids"] == expected(backend, [60, 61, 62], params(6))


@drafting("alphabet")
@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_the_grammar_takes_the_final_tokens_only(backend, runner, loop):
    """Drafts that the grammar allows and the model does not pick leave no trace in the matcher: text allowed by the
    grammar is drafted all along, and the rest of the output is still what the oracle says."""
    served = engine(runner, backend, loop)
    for more in GRAMMARS:
        sampling = params(**more)
        result = served.generate(input_ids=PROMPT, sampling_params=sampling)
        assert result["output_ids"] == expected(backend, PROMPT, sampling)
        check_ended(sampling, result)


# Tokens that the grammar refuses.

OWN = expected(None, PROMPT, params(30))  # the model's, free
KEPT = 7  # the one behind them is refused: in the middle of a run


@pytest.fixture
def unmasked(monkeypatch, backend):
    """As if masks were not applied: the tokens are the model's own, and a grammar refuses the one behind KEPT."""
    monkeypatch.setattr(backend, "fill_masks", lambda rows, words: None)
    monkeypatch.setattr(LLGrammar, "fill_mask", lambda self, words, ahead: words.fill(-1))
    return re.escape("".join(map(chr, OWN[:KEPT]))) + "\n+"


@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_a_refused_token_is_not_shown(unmasked, runner, backend, loop):
    served = engine(runner, backend, loop)
    results = served.generate(input_ids=[PROMPT, [60, 61]], sampling_params=[params(regex=unmasked), params(9)])
    assert results[0]["output_ids"] == OWN[:KEPT]
    meta = results[0]["meta_info"]
    assert (meta["finish_reason"]["type"], meta["finish_reason"]["status_code"]) == ("abort", 500)
    assert f"the grammar refused a token, {OWN[KEPT]}:" in meta["finish_reason"]["message"]
    assert meta["completion_tokens"] == KEPT
    assert results[1]["output_ids"] == expected(backend, [60, 61], params(9))
    check_all_back(served)


@pytest.mark.parametrize("loop", ["overlap", "normal"])
@pytest.mark.parametrize("end", [{"max_new_tokens": KEPT}, {"stop_token_ids": [OWN[KEPT - 1]]}])
def test_an_end_in_front_of_a_refused_token_stands(unmasked, runner, backend, loop, end):
    served = engine(runner, backend, loop)
    result = served.generate(input_ids=PROMPT, sampling_params={**params(regex=unmasked), **end})
    assert result["output_ids"] == OWN[:KEPT]
    assert result["meta_info"]["finish_reason"]["type"] == ("length" if "max_new_tokens" in end else "stop")
    check_all_back(served)


@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_a_refused_token_does_not_replace_an_abort(unmasked, runner, backend, loop):
    """The caller's, which comes in the turn that handles the refused one."""
    messages, last = [], -1
    for aborts in (False, True):
        served = engine(runner, backend, loop)
        stream = served.generate(input_ids=PROMPT, sampling_params=params(regex=unmasked), rid="one", stream=True)
        while not served._scheduler.counters.finished:
            now = served.metrics()["turns"]
            if aborts and now == last:
                served._scheduler.abort("one", exact=True)
                served._loop._poked = True
            turn(served)
        last = now
        *_, result = stream
        messages.append(result["meta_info"]["finish_reason"]["message"])
        check_all_back(served)
    assert "refused" in messages[0]
    assert "refused" not in messages[1]


@pytest.mark.parametrize("loop", ["overlap", "normal"])
def test_a_minimum_that_leaves_the_grammar_no_token_is_named(runner, backend, loop):
    served = engine(runner, backend, loop)
    sampling = params(regex="abcdef(yes|no)", stop_token_ids=list(b"yn"), min_new_tokens=8)
    result = served.generate(input_ids=PROMPT, sampling_params=sampling)
    assert result["text"] == "abcdef"
    assert "token 7 may be no stop token, for min_new_tokens is 8" in result["meta_info"]["finish_reason"]["message"]
    check_all_back(served)
