"""EAGLE-3 heads in the engine: tokens are those without speculation whatever the head proposes, and what it proposes is
what the float64 head drafts behind the same context (reference_eagle3.py)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_models import make_eagle3_dir, make_hf_dir
from reference_eagle3 import Reference

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.buckets import Buckets
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.device.verify import write_history
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load_grammar_backend
from jaxoverlap.models import registry
from jaxoverlap.speculative.eagle import Eagle3Speculator
from jaxoverlap.speculative.load import all_caches, load_speculator

CONTEXT, TOTAL, TOKENS, VOCAB = 96, 144, 4, 272
SETTINGS = {
    "max_running_requests": 3,
    "context_length": CONTEXT,
    "max_total_tokens": TOTAL,
    "chunked_prefill_size": 16,
    "grammar_backend": "none",
    "random_seed": 0,
    "audit": True,
    "init_new_token_ratio": 0.05,
}
GREEDY, FEW = {"temperature": 0.0}, [5, 90, 200]  # of few ids, drafts of a random head count now and then
SAMPLING = [
    GREEDY,
    {**GREEDY, "logit_bias": {str(i): 20.0 for i in FEW}},
    {"temperature": 1.0, "logit_bias": {str(i): 20.0 for i in FEW}, "sampling_seed": 7},
    {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.7, "sampling_seed": 8},
]


def bias_of(sampling):
    """float64 [VOCAB] of a greedy request that adjusts nothing else; None of another."""
    if sampling["temperature"] > 0:
        return None
    bias = np.zeros(VOCAB)
    for i, value in sampling.get("logit_bias", {}).items():
        bias[int(i)] = value
    return bias


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and a head that knows the few ids and some more."""
    folder = tmp_path_factory.mktemp("eagle3")
    make_hf_dir(folder / "target", num_hidden_layers=4)
    make_eagle3_dir(folder / "head", layers=(0, 1, 2), known=FEW)
    return folder


def config_of(folder, **settings):
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder / "head")}
    return EngineConfig(**{"model_path": str(folder / "target"), **SETTINGS, **drafts, **settings})


class Recorder(Eagle3Speculator):
    """Notes each row's context and its drafts, as the device has them."""

    def __init__(self, made):
        super().__init__(made.draft, made.layers, made.num_draft_tokens)
        self.seen = []

    def extend(self, step, weights, state):
        state = super().extend(step, weights, state)
        return dataclasses.replace(state, history=write_history(state, step.ids, step.context))

    def propose(self, step, weights, state):
        drafts, state = super().propose(step, weights, state)
        at = jnp.broadcast_to(jnp.arange(CONTEXT, dtype=jnp.int32), (len(step.slots), CONTEXT))
        context = state.history[step.context(state, 1, 0).locations(at)]
        jax.debug.callback(self.note, step.slots, step.lens, context, step.bonus, drafts.T)
        return drafts, state

    def note(self, *arrays):
        for slot, length, context, bonus, drafts in zip(*(np.asarray(x) for x in arrays)):
            if slot:
                self.seen.append(([*context[:length].tolist(), int(bonus)], drafts.tolist()))


def load_of(rng, n=14):
    """Prompts of one to three chunks, some with a common beginning, so that the tree serves what others have left."""
    shared = rng.integers(3, 250, 30).tolist()
    prompts = [rng.integers(3, 250, rng.integers(1, 40)).tolist() for _ in range(n)]
    prompts = [shared[: rng.integers(8, 30)] + p[:16] if i % 3 == 0 else p for i, p in enumerate(prompts)]
    return prompts, [{"max_new_tokens": int(rng.integers(8, 40)), **SAMPLING[i % 4]} for i in range(n)]


class Served:
    """A model and its runner, which compiles one shape of each kind, for engines of either loop."""

    def __init__(self, config, wrap=None, *, grammars=False):
        self.config, self.model = config, registry.load(config)
        where = {"max_total_tokens": config.max_total_tokens, "context_length": config.context_length}
        buckets = Buckets.of(config, **where)
        buckets = dataclasses.replace(buckets, decode=buckets.decode[-1:])
        made = load_speculator(config, self.model)
        made = wrap(made) if wrap else made
        self.runner = JaxRunner(self.model.module, config, **where, speculator=made, buckets=buckets, cut=grammars)
        self.runner.warm_up()
        self.backend = load_grammar_backend(config, self.model)

    def answers(self, prompts, sampling, **settings):
        """Output ids, and the engine's metrics."""
        fields = {name: getattr(self.config, name) for name in self.config.__slots__} | settings
        engine = Engine.from_parts(
            EngineConfig(**fields), self.model, self.runner, self.config.max_total_tokens, self.backend
        )
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        engine.wait_idle()
        hits = sum(result["meta_info"]["cached_tokens"] for result in results)
        return [result["output_ids"] for result in results], {**engine.metrics(), "hits": hits}

    def close(self):
        if self.backend is not None:
            self.backend.shutdown()
        self.runner.shutdown()


@pytest.fixture(scope="module")
def plain(folder):
    """Gives the load of a seed, and what an engine without speculation answers."""
    served = Served(EngineConfig(model_path=str(folder / "target"), **SETTINGS))

    @functools.cache
    def answered(seed):
        prompts, sampling = load_of(np.random.default_rng(seed))
        return prompts, sampling, served.answers(prompts, sampling)[0]

    yield answered
    served.close()


@pytest.mark.parametrize(
    ("page", "seeds"),
    [
        (4, [0]),
        *(pytest.param(page, range(1, 13), marks=pytest.mark.soak) for page in (1, 4)),
    ],
)
def test_tokens_and_drafts(folder, plain, page, seeds):
    """In both loops, with prompts in chunks, from cached prefixes, and where rows are put back for want of pages."""
    served = Served(config_of(folder, page_size=page), Recorder)
    recorder, compiled = served.runner._speculator, served.runner.compiles
    reference = Reference(folder / "target", folder / "head")
    retracted = 0
    for seed in seeds:
        prompts, sampling, want = plain(seed)
        for normal in (False, True):
            outputs, metrics = served.answers(prompts, sampling, disable_overlap_schedule=normal)
            assert outputs == want
            assert min(metrics["accepted_drafts"], metrics["hits"]) > 0
            retracted += metrics["retracted"]
        jax.effects_barrier()
        check_drafts(reference, recorder.seen, plain(seed))
        recorder.seen.clear()
    assert served.runner.compiles == compiled
    assert retracted > 0
    served.close()


def check_drafts(reference, seen, answered):
    """Of every greedy request, wherever drafts were made."""
    made = {}
    for context, drafts in seen:
        assert made.setdefault(tuple(context), drafts) == drafts  # in both loops
    checked = counted = 0
    for prompt, sampling, output in zip(*answered):
        bias, ids = bias_of(sampling), [*prompt, *output]
        if bias is None:
            continue
        logits, reduced = reference.target_forward(ids)
        assert (logits + bias).argmax(-1)[len(prompt) - 1 : -1].tolist() == output
        for n in range(len(prompt) + 1, len(ids) + 1):
            if tuple(ids[:n]) not in made:
                continue
            drafts, lead = reference.drafts(ids[:n], reduced, TOKENS - 1, bias)
            assert made[tuple(ids[:n])] == drafts, (n, lead)
            checked += 1
            counted += ids[n : n + 1] == drafts[:1]
    assert checked > 50
    assert counted > 5


@pytest.mark.soak
def test_grammars(folder):
    """Rows with grammars beside free ones, drafted under the masks that are known: the tokens of plain decoding, in
    both loops and where drafts are launched before the result in flight is handled."""
    prompts, sampling = load_of(np.random.default_rng(1), 8)
    sampling = [
        {**one, "regex": "[a-f]{4,}[0-9]+" if i % 4 < 2 else "(ab|ba)*c"} if i % 3 else one
        for i, one in enumerate(sampling)
    ]
    more = {"grammar_backend": "llguidance", "max_total_tokens": 288}
    served = Served(EngineConfig(**{"model_path": str(folder / "target"), **SETTINGS, **more}), grammars=True)
    want, _ = served.answers(prompts, sampling)
    served.close()
    served = Served(config_of(folder, **more), grammars=True)
    compiled = served.runner.compiles
    for loop in ({}, {"disable_overlap_schedule": True}, {"speculative_grammar_overlap": True}):
        outputs, metrics = served.answers(prompts, sampling, **loop)
        assert outputs == want
        assert metrics["accepted_drafts"] > 0
    assert served.runner.compiles == compiled
    served.close()


def test_refused_by_name(folder):
    """Before anything starts."""
    head, target = str(folder / "head"), str(folder / "target")
    for model, settings, part in [
        ("checksum", {}, "EAGLE3: model checksum has no layers"),
        (target, {"speculative_draft_model_path": "no/such"}, "speculative_draft_model_path 'no/such' is no directory"),
        (target, {"speculative_draft_model_path": target}, "is no EAGLE-3 head"),
        (target, {"speculative_eagle_topk": 4}, "speculative_eagle_topk must be 1"),
        (target, {"max_logprobs": 2}, "max_logprobs and speculative_algorithm"),
    ]:
        with pytest.raises(ValueError, match=part):
            Engine(model, **{"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, **settings})


def test_the_head_counts_in_the_pool(folder):
    config = config_of(folder, speculative_num_steps=5)
    model = registry.load(config)
    made = load_speculator(config, model)
    assert made.layers == (1, 2, 3)
    assert made.num_draft_tokens == 6
    shapes = [x.shape for x in all_caches(model.module, made)(10)]
    assert shapes == [(40, 2, 8), (40, 2, 8), (10, 2, 8), (10, 2, 8), (10,)]  # target, head, tokens
    assert made.hidden_shape(4).shape == (4, 32)
