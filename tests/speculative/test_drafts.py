"""Drafts of real models on tiny random ones, and n-gram drafts: what is drafted, and that it changes no token."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_models import make_hf_dir

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import Engine
from jaxoverlap.models.paged import PagedContext
from jaxoverlap.speculative.ngram import LONGEST, WIDTH, look_up

SETTINGS = {
    "max_running_requests": 4,
    "context_length": 96,
    "max_total_tokens": 384,
    "chunked_prefill_size": 16,
    "grammar_backend": "none",
    "random_seed": 0,
    "audit": True,
}
DRAFTS = {
    "ngram": {"speculative_algorithm": "NGRAM"},
    "layers": {"speculative_algorithm": "STANDALONE", "speculative_draft_layers": 1},
    "itself": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "itself"},
    "other": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "other"},
}
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "sampling_seed": 8},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.0, "frequency_penalty": 1.5, "logit_bias": {"5": 3.0}, "sampling_seed": 9},
    {"temperature": 0.0, "min_new_tokens": 12, "stop_token_ids": list(range(0, 200))},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, seed, layers in (("itself", 0, 2), ("other", 1, 1)):
        make_hf_dir(folder / name, seed=seed, num_hidden_layers=layers, eos_token_id=271)
    return folder


def load(rng, n=12):
    prompts = [rng.integers(3, 250, rng.integers(1, 40)).tolist() for _ in range(n)]
    shared = rng.integers(3, 250, 30).tolist()
    prompts = [shared[: rng.integers(4, 30)] + p[:20] if i % 3 == 0 else p for i, p in enumerate(prompts)]
    return prompts, [{"max_new_tokens": int(rng.integers(1, 40)), **SAMPLING[i % len(SAMPLING)]} for i in range(n)]


def start(models, drafts, **more):
    settings = {**SETTINGS, **DRAFTS.get(drafts, {}), **more}
    if "speculative_draft_model_path" in settings:
        settings["speculative_draft_model_path"] = str(models / settings["speculative_draft_model_path"])
    return Engine(str(models / "itself"), **settings)


@pytest.fixture(scope="module")
def plain(models):
    """Loads, and what an engine without speculation answers."""
    loads = [load(np.random.default_rng(seed)) for seed in range(2)]
    with start(models, "none") as engine:
        return [(x, [r["output_ids"] for r in engine.generate(input_ids=x[0], sampling_params=x[1])]) for x in loads]


QUICK = [("ngram", 1), ("layers", 4)]
REST = [(name, page) for name in DRAFTS for page in (1, 4) if (name, page) not in QUICK]


@pytest.mark.parametrize(
    ("name", "page"),
    [
        pytest.param(*QUICK[0], marks=pytest.mark.slow),
        pytest.param(*QUICK[1], marks=pytest.mark.soak),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in REST),
    ],
)
def test_tokens_are_those_without_speculation(models, plain, name, page):
    """Sampled ones too, with penalties, biases and minima inside a run; also where rows are put back for want of
    pages."""
    with start(models, name, page_size=page, max_total_tokens=192, init_new_token_ratio=0.05) as engine:
        compiled = engine.runner.compiles
        for loop in ("overlap", "normal"):
            both = engine if loop == "overlap" else other_loop(engine)
            for (prompts, sampling), want in plain:
                results = both.generate(input_ids=prompts, sampling_params=sampling)
                assert [r["output_ids"] for r in results] == want
            both.wait_idle()
            metrics = both.metrics()
            both.flush_cache()
            rate = metrics["accepted_drafts"] / (3 * metrics["verified_rows"])
            assert rate > 0.7 if name == "itself" else rate < 0.7
        assert engine.runner.compiles == compiled


def other_loop(engine):
    fields = {name: getattr(engine.config, name) for name in engine.config.__slots__}
    config = EngineConfig(**{**fields, "disable_overlap_schedule": True})
    return Engine.from_parts(config, engine.model, engine.runner, engine.max_total_tokens)


@pytest.mark.soak
def test_the_model_itself_drafts_right_from_a_cached_prefix(models):
    """Every draft of a greedy request counts, so the draft's cache holds every token, those of cached prefixes too: the
    last draft of a run that counted whole is written with the next step."""
    prompt = list(range(10, 40))
    with start(models, "itself", speculative_num_draft_tokens=3) as engine:
        for _ in range(2):
            result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 25, "temperature": 0.0})
            assert result["meta_info"]["spec_accept_rate"] == 1.0
            prompt = prompt + result["output_ids"][:20] + [7]
        assert result["meta_info"]["cached_tokens"] >= 45


def drafted(tokens, drafts):
    """Prompt lookup, written out: the continuation of the longest and latest earlier match."""
    last = len(tokens) - 1
    best, end = 0, -1
    for p in range(last):
        n = 0
        while n < LONGEST and n <= p and tokens[p - n] == tokens[last - n]:
            n += 1
        if n and n >= best:
            best, end = n, p
    out = list(tokens)
    for j in range(drafts):
        out.append(out[end + 1 + j] if end >= 0 else tokens[last])
    return out[len(tokens) :]


@pytest.mark.parametrize("page", [1, 4])
def test_ngram_drafts(page):
    """Over contexts of few different tokens, shorter and longer than the blocks that are looked through."""
    rng = np.random.default_rng(page)
    lens = [1, 2, 3, 9, 40, WIDTH - 1, WIDTH, WIDTH + 1, WIDTH + 5, 2 * WIDTH, 2 * WIDTH + 7, 3 * WIDTH]
    pages = -(-max(lens) // page) + 1
    table = (1 + rng.permutation(len(lens) * pages)).reshape(len(lens), pages).astype(np.int32)
    history = rng.integers(0, 5, (table.max() + 1) * page).astype(np.int32)  # what lies behind a row's end is no match
    rows = [rng.integers(0, [2, 3, 30][i % 3], n).tolist() for i, n in enumerate(lens)]
    for row, own in zip(rows, table):
        at = np.arange(len(row))
        history[own[at // page] * page + at % page] = row
    where = SimpleNamespace(page_table=jnp.asarray(table), page_size=page)
    where.locations = partial(PagedContext.locations, where)
    got = jax.jit(lambda h, last: look_up(h, where, last, 5))(history, np.array(lens, np.int32) - 1)
    assert np.asarray(got).T.tolist() == [drafted(row, 5) for row in rows]
