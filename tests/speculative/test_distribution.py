"""Sampled tokens with drafts of another distribution, many of which do not count: those of the target's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from device.helpers import ConstantModel
from helpers_speculative import engine_on, make_runner
from scipy import stats

from jaxoverlap.device.verify import Speculator

VOCAB, TOKENS = 24, 4
RNG = np.random.default_rng(5)
TARGET = RNG.normal(size=VOCAB) * 1.5
DRAFT = TARGET + RNG.normal(size=VOCAB) * 0.8
REQUESTS, LENGTH = 50, 400  # 20,000 draws
SAMPLING = [
    pytest.param({"temperature": 0.7, "top_k": 9}, marks=pytest.mark.slow),
    *(
        pytest.param(sampling, marks=pytest.mark.soak)
        for sampling in ({"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.1})
    ),
]


class OtherLogits(Speculator):
    """Drafts from DRAFT, whatever the model says."""

    num_draft_tokens = TOKENS

    def propose(self, step, weights, state):
        logits = jnp.broadcast_to(jnp.asarray(DRAFT, jnp.float32), (len(step.slots), VOCAB))
        return jnp.stack([step.pick(state, logits, ahead)[0] for ahead in range(TOKENS - 1)]), state


def distribution(temperature=1.0, top_k=VOCAB, top_p=1.0, min_p=0.0):
    """float64 [VOCAB]"""
    p = np.exp(TARGET / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = order[(np.arange(VOCAB) < top_k) & (before <= top_p) & (p[order] >= min_p * p.max())]
    out = np.zeros(VOCAB)
    out[kept] = p[kept]
    return out / out.sum()


@pytest.fixture(scope="module")
def model():
    model = ConstantModel(TARGET)
    model.config = dataclasses.replace(model.config, eos_token_ids=())
    return model


@pytest.mark.parametrize("sampling", SAMPLING)
def test_twenty_thousand_draws(model, sampling):
    settings = {"max_running_requests": REQUESTS}
    runner = make_runner(OtherLogits(), model=model, total=REQUESTS * 450, context=440, **settings)
    engine = engine_on(runner, "overlap", model=model, total=REQUESTS * 450, context=440, **settings)
    params = {"max_new_tokens": LENGTH, **sampling}
    results = engine.generate(input_ids=[[1, i % VOCAB] for i in range(REQUESTS)], sampling_params=params)
    draws = np.array([r["output_ids"] for r in results])
    assert draws.shape == (REQUESTS, LENGTH)
    wanted = distribution(**sampling)
    observed = np.bincount(draws.ravel(), minlength=VOCAB)
    assert observed[wanted == 0].sum() == 0
    there = wanted > 0
    assert stats.chisquare(observed[there], wanted[there] * draws.size).pvalue > 1e-3
    pairs = np.histogram2d(draws[:, :-1].ravel(), draws[:, 1:].ravel(), bins=VOCAB, range=[[0, VOCAB]] * 2)[0]
    wanted_pairs = np.outer(wanted, wanted) * pairs.sum()
    often = wanted_pairs > 5  # neighbours, many of which come from one run, are independent
    statistic = ((pairs - wanted_pairs)[often] ** 2 / wanted_pairs[often]).sum()
    assert stats.chi2.sf(statistic, often.sum()) > 1e-3
    rates = [r["meta_info"]["spec_accept_rate"] for r in results]
    assert 0.1 < np.mean(rates) < 0.9
    runner.shutdown()
