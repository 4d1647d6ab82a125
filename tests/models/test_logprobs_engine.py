"""Log-probabilities of a random Llama through the engine: those of the float64 forward, and, where every launch has one
shape, the same bits with overlap on and off."""

import dataclasses

import numpy as np
import pytest
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights
from test_llama import reference_logits

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.models import registry

K, TOTAL, CONTEXT, CHUNK, ROWS = 5, 192, 48, 8, 3
SHARED = [5, 250, 17, 17, 3, 99, 0, 42, 8, 71, 13]
PROMPTS = [SHARED, [*SHARED, 60, 1], [*SHARED[:6], 9, 4, 4], [7] * 12, [271], [*SHARED, 60, 2, 2, 90, 31, 12]]
STARTS = [0, 4, 6, -1, 0, 11]
TOPS = [5, 0, 2, 1, 3, 4]
IDS = [None, [7, 270], None, [0], None, [3, 3, 17, 8, 1]]
SAMPLING = [
    *({"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.9, "sampling_seed": 5}, {"temperature": 0.0}),
    *({"temperature": 1.2, "top_k": 20, "sampling_seed": 6}, {"temperature": 0.0}),
]


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)], ids=["page1", "page4"])
def engines(request, tmp_path_factory):
    """Engines by loop, over one runner with one decode and one extend shape."""
    page = request.param
    config = EngineConfig(
        model_path=str(make_hf_dir(tmp_path_factory.mktemp("model"))),
        page_size=page,
        max_running_requests=ROWS,
        chunked_prefill_size=CHUNK,
        context_length=CONTEXT,
        random_seed=3,
        max_logprobs=K,
    )
    model = registry.load(config)
    extend = Bucket(CHUNK, ROWS, CHUNK // page + ROWS, False)
    buckets = Buckets((Bucket(ROWS, ROWS, ROWS, True),), (extend,))
    runner = JaxRunner(model.module, config, max_total_tokens=TOTAL, context_length=CONTEXT, buckets=buckets)
    runner.warm_up()

    def make(loop):
        off = dataclasses.replace(config, disable_overlap_schedule=loop == "normal")
        return Engine.from_parts(off, model, runner, TOTAL)

    yield make
    runner.shutdown()


def answers(engine):
    """All prompts at once, twice: the second time their prefixes are cached."""
    out = []
    for _ in range(2):
        out += engine.generate(
            input_ids=PROMPTS,
            sampling_params=[{**s, "max_new_tokens": 6, "ignore_eos": True} for s in SAMPLING],
            return_logprob=True,
            logprob_start_len=STARTS,
            top_logprobs_num=TOPS,
            token_ids_logprob=IDS,
        )
    engine.wait_idle()
    assert engine.flush_cache()
    return [(r["output_ids"], {n: v for n, v in r["meta_info"].items() if n.endswith("logprobs")}) for r in out]


def test_same_bits_and_the_float64_forwards(engines):
    overlap, normal = answers(engines("overlap")), answers(engines("normal"))
    assert overlap == normal
    weights = tiny_weights(TINY_CONFIG)
    for i, (outputs, meta) in enumerate(overlap):
        i %= len(PROMPTS)
        context = [*PROMPTS[i], *outputs]
        logits = reference_logits(TINY_CONFIG, weights, context[:-1])
        truth = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        truth -= logits.max(1, keepdims=True)
        at = len(PROMPTS[i])
        start = at if STARTS[i] == -1 else STARTS[i]
        check(meta, "output", truth[at - 1 :], context[at:], TOPS[i], IDS[i])
        if start == at:
            assert not any(v for name, v in meta.items() if name.startswith("input"))
            continue
        assert meta["input_token_logprobs"][0] == (None, context[start], None)
        for name in ("input_top_logprobs", "input_token_ids_logprobs"):
            assert name not in meta or meta[name][0] is None
        inputs = {name: v[1:] for name, v in meta.items() if name.startswith("input")}
        check(inputs, "input", truth[start : at - 1], context[start + 1 : at], TOPS[i], IDS[i])


def check(meta, kind, truth, tokens, top, ids):
    """`truth` float64 [N, V] behind each place, `tokens` the ones that followed."""
    near = {"abs": 2e-4, "rel": 0}
    told = meta[f"{kind}_token_logprobs"]
    assert [t for _, t, _ in told] == tokens
    assert [lp for lp, _, _ in told] == pytest.approx([row[t] for row, t in zip(truth, tokens)], **near)
    assert (f"{kind}_top_logprobs" in meta) == (top > 0)
    assert (f"{kind}_token_ids_logprobs" in meta) == (ids is not None)
    for told, row in zip(meta.get(f"{kind}_top_logprobs", ()), truth, strict=top > 0):
        assert [t for _, t, _ in told] == np.argsort(-row)[:top].tolist()
        assert [lp for lp, _, _ in told] == pytest.approx(np.sort(row)[::-1][:top], **near)
    for told, row in zip(meta.get(f"{kind}_token_ids_logprobs", ()), truth, strict=ids is not None):
        assert [t for _, t, _ in told] == ids
        assert [lp for lp, _, _ in told] == pytest.approx(row[ids], **near)


def test_the_cache_was_hit_up_to_each_start(engines):
    engine = engines("overlap")
    page = engine.config.page_size
    engine.generate(input_ids=PROMPTS[5], sampling_params={"max_new_tokens": 1})
    for start, cached in ((0, 0), (7, 7), (11, 11), (-1, 16)):
        asked = {"return_logprob": True, "logprob_start_len": start}
        r = engine.generate(input_ids=PROMPTS[5], sampling_params={"max_new_tokens": 1}, **asked)
        assert r["meta_info"]["cached_tokens"] == cached // page * page
    engine.wait_idle()
    assert engine.flush_cache()
