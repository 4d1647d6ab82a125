"""Engines on JAX whose logits are the same for every position, so that what sampling does has a closed form."""

from __future__ import annotations

import dataclasses

from device.helpers import ConstantModel
from helpers_engine import model_of

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine

CONTEXT, TOTAL = 64, 512


class Constant:
    """A warm runner over constant logits, and engines on it, one at a time."""

    def __init__(self, logits, rows=4):
        self.model = ConstantModel(logits)
        self.model.config = dataclasses.replace(self.model.config, eos_token_ids=())
        self.settings = {"model_path": "checksum", "max_running_requests": rows, "chunked_prefill_size": 16}
        config = EngineConfig(**self.settings)
        self.runner = JaxRunner(self.model, config, max_total_tokens=TOTAL, context_length=CONTEXT)
        self.runner.warm_up()

    def engine(self, overlap=True, tokenizer=None, **settings):
        settings = {
            **self.settings,
            "random_seed": 0,
            "audit": True,
            "disable_overlap_schedule": not overlap,
            **settings,
        }
        served = model_of(tokenizer, CONTEXT, module=self.model)
        return Engine.from_parts(EngineConfig(**settings), served, self.runner, TOTAL)

    def outputs(self, sampling, overlap=True, prompts=None, **settings):
        """Output ids of one call; by default a prompt of its own for each entry of `sampling`."""
        prompts = prompts or [[3 + i, 5] for i in range(len(sampling))]
        results = self.engine(overlap, **settings).generate(input_ids=prompts, sampling_params=sampling)
        return [r["output_ids"] for r in results]
