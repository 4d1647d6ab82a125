"""Speculators of the checksum model whose drafts are right by a rule that the test sets."""

import dataclasses

import jax.numpy as jnp
from helpers_engine import model_of

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.device.verify import Speculator
from jaxoverlap.engine import Engine
from jaxoverlap.models.checksum import ChecksumModel

WRONG = -1  # no token equals it
CONTEXT = 128
ROWS = 4


class RuleSpeculator(Speculator):
    """Drafts the model's own tokens at the positions where `rule(position)` says so, else wrong ones."""

    def __init__(self, num_draft_tokens, rule):
        self.num_draft_tokens = num_draft_tokens
        self.rule = rule

    def propose(self, step, weights, state):
        ids, cache, drafts = step.bonus, state.cache, []
        for ahead in range(self.num_draft_tokens - 1):
            hidden, cache = step.model(ids, step.context(state, 1, ahead), cache)
            ids, _ = step.pick(state, step.model.logits(hidden), ahead)
            drafts.append(jnp.where(self.rule(step.lens + ahead + 1), ids, WRONG))
        return jnp.stack(drafts), dataclasses.replace(state, cache=cache)


RULES = {
    "always": lambda position: position >= 0,
    "never": lambda position: position < 0,
    "mixed": lambda position: position % 3 != 0,
}


def settings_of(**settings):
    """Of an engine; NGRAM stands for whatever speculator the runner has."""
    return {
        "model_path": "checksum",
        "max_running_requests": ROWS,
        "random_seed": 0,
        "chunked_prefill_size": 32,
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4,
        **settings,
    }


def make_runner(speculator, *, model=None, total=320, context=CONTEXT, cut=False, script=None, **settings):
    config = EngineConfig(**settings_of(**settings))
    runner = JaxRunner(
        model or ChecksumModel(),
        config,
        max_total_tokens=total,
        context_length=context,
        cut=cut,
        speculator=speculator,
        script=script,
    )
    runner.warm_up()
    return runner


def engine_on(runner, loop, *, model=None, total=320, context=CONTEXT, tokenizer=None, backend=None, **settings):
    settings = settings_of(audit=True, disable_overlap_schedule=loop == "normal", **settings)
    module = model or ChecksumModel()
    served = model_of(tokenizer, module=module, context_length=context)
    return Engine.from_parts(EngineConfig(**settings), served, runner, total, backend)
