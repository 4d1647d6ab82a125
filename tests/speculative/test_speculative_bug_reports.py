"""tests/README.md H2, H5 and H6 with runs of several tokens, through the engine on JAX."""

import pytest
from helpers_engine import byte_level_tokenizer, check_all_back, oracle
from helpers_speculative import RULES, RuleSpeculator, engine_on, make_runner

from jaxoverlap.device.state import Script
from jaxoverlap.models.checksum import ChecksumConfig, ChecksumModel
from jaxoverlap.speculative.ngram import NgramSpeculator

LOOPS = pytest.mark.parametrize("loop", ["overlap", "normal"])
TEXT = b"def fibonacci(n): return n if n < 2 else fibonacci(n - 1)"
BYTES = ChecksumConfig(vocab_size=272, offset=32, span=95, eos_token_ids=(256,))


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_h2_retraction_with_a_step_in_flight(page):
    runner = make_runner(NgramSpeculator(4), total=80, page_size=page)
    for loop in ("overlap", "normal"):
        pressure = {"init_new_token_ratio": 0.05, "retract_decode_steps": 2}
        engine = engine_on(runner, loop, total=80, page_size=page, **pressure)
        prompts = [list(range(100 + 10 * i, 108 + 10 * i)) for i in range(4)]
        sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        streamed = {i: [] for i in range(4)}
        for chunk in engine.generate(input_ids=prompts, sampling_params=sampling, stream=True):
            ids, before = chunk["output_ids"], streamed[chunk["index"]]
            assert ids[: len(before)] == before
            streamed[chunk["index"]] = ids
        assert streamed == {i: oracle(p, 24) for i, p in enumerate(prompts)}
        assert engine.metrics()["retracted"] > 0
        lone = engine.generate(input_ids=prompts[0], sampling_params={**sampling, "max_new_tokens": 100})
        assert lone["meta_info"]["finish_reason"]["type"] == "length"
        assert lone["output_ids"] == oracle(prompts[0], len(lone["output_ids"]))
        assert len(lone["output_ids"]) > 40
        check_all_back(engine)
    runner.shutdown()


@pytest.fixture(
    scope="module", params=[5, pytest.param(2, marks=pytest.mark.soak), pytest.param(8, marks=pytest.mark.soak)]
)
def tokens(request):
    return request.param


@pytest.fixture(scope="module")
def runner(tokens):
    """Forced outputs, all of them drafted: each run has `tokens` tokens."""
    script = Script(64, lambda request: list(TEXT))
    speculator = RuleSpeculator(tokens, RULES["always"])
    drafts = {"speculative_num_draft_tokens": tokens}
    runner = make_runner(speculator, model=ChecksumModel(BYTES), script=script, **drafts)
    yield runner
    runner.shutdown()


def answer(runner, loop, tokens, sampling, **settings):
    served = {"model": ChecksumModel(BYTES), "tokenizer": byte_level_tokenizer()}
    engine = engine_on(runner, loop, speculative_num_draft_tokens=tokens, **served, **settings)
    both = engine.generate(input_ids=[[50, 51], list(range(40, 80))], sampling_params={"temperature": 0.0, **sampling})
    assert both[0]["output_ids"] == both[1]["output_ids"]
    check_all_back(engine)
    return both[0]


@LOOPS
@pytest.mark.parametrize("stop", [["fib"], ["ibon"], ["nacci(n"], [": r", "no such"]])
def test_h6_a_stop_string_inside_a_run(runner, loop, tokens, stop):
    end = TEXT.index(stop[0].encode())
    result = answer(runner, loop, tokens, {"max_new_tokens": 50, "stop": stop})
    assert result["text"] == TEXT[:end].decode()
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop[0]}
    assert result["meta_info"]["completion_tokens"] == end + len(stop[0])
    kept = answer(runner, loop, tokens, {"max_new_tokens": 50, "stop": stop, "no_stop_trim": True})
    assert kept["text"] == TEXT[: end + len(stop[0])].decode()


@LOOPS
@pytest.mark.parametrize("cap", range(8, 16))
def test_h5_a_stop_and_the_cap_in_one_run(runner, loop, tokens, cap):
    """The stop is token 9 of the text: shown up to it, or to the cap, whichever comes first; stop-first names it so."""
    at = TEXT.index(b"o")
    sampling = {"max_new_tokens": cap, "stop_token_ids": [TEXT[at]]}
    result = answer(runner, loop, tokens, sampling, finish_order="stop-first")
    assert len(result["output_ids"]) == min(cap, at + 1)
    assert result["meta_info"]["finish_reason"]["type"] == ("stop" if cap > at else "length")
