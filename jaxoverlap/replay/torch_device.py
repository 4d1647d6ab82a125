"""Scenarios on the PyTorch runner, one for each rank of each scenario: nothing is compiled, so none need be shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from jaxoverlap.compare.torch_checksum import TorchChecksum
from jaxoverlap.compare.torch_paged import PagedContext
from jaxoverlap.compare.torch_runner import Force, TorchRunner
from jaxoverlap.compare.torch_sample import sample
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Request, Runner, StepResult
from jaxoverlap.replay.scenario import CONTEXT_LENGTH, Scenario


def make_runner(config: EngineConfig, scenario: Scenario, rank: int) -> Runner:
    """A RunnerFactory for play()."""
    assert config.max_total_tokens is not None
    tokens = config.max_total_tokens // config.page_size * config.page_size

    def force(request: Request, index: int) -> int:
        return scenario.force.get(request.rid, {}).get(index, -1)

    made = VerifyRunner if config.speculative_num_draft_tokens else TorchRunner
    return made(TorchChecksum(), config, max_total_tokens=tokens, context_length=CONTEXT_LENGTH, force=force)


class VerifyRunner(TorchRunner):
    """With the scenarios' speculation (replay/device.py's ToySpeculator) in decode launches. On the CPU."""

    def __init__(self, model: TorchChecksum, config: EngineConfig, *, force: Force, **lengths: int) -> None:
        super().__init__(model, config, force=force, **lengths)  # type: ignore[arg-type]
        self._drafts = config.speculative_num_draft_tokens
        self._forced_token = force
        self._span: int = model.config.span
        self._new_seq_lens = torch.zeros(config.max_running_requests + 1, dtype=torch.int64)

    @torch.inference_mode()
    def launch(self, launches: list[Launch]) -> list[Any]:
        """Of a verify step the handle is the result itself."""
        (launch,) = launches
        if launch.mode.is_decode:
            return [self._verify(launch)]
        self._new_seq_lens[torch.from_numpy(launch.slots).long()] = torch.from_numpy(launch.seq_lens).long()
        return super().launch(launches)

    def wait(self, handle: Any) -> StepResult:
        return handle if isinstance(handle, StepResult) else super().wait(handle)

    def is_ready(self, handle: Any) -> bool:
        return isinstance(handle, StepResult) or super().is_ready(handle)

    def _verify(self, launch: Launch) -> StepResult:
        handle = self._upload(launch)
        slots = handle.fields["slots"].long()
        lens, bonus = self._new_seq_lens[slots], self._output_tokens[slots]
        ids, tokens, logprobs, accepted = bonus, [], [], torch.ones_like(bonus)
        for ahead in range(self._drafts):
            seq_lens = lens + ahead + 1
            span = self._decode_span(slots, seq_lens, int(seq_lens.max()))
            hidden = self._model(ids, PagedContext([span], self._num_locs), self._cache)
            if ahead == 0:
                accepted = 1 + hidden[:, 0] // self._span % self._drafts
            mask = None if launch.mask is None else torch.from_numpy(np.ascontiguousarray(launch.mask[:, ahead]))
            forced = [self._forced_token(r, n - r.prompt_len) for r, n in zip(launch.requests, seq_lens.tolist())]
            logits = self._model.logits(hidden)
            ids, logprob = sample(logits, handle.params, seq_lens, mask, torch.tensor(forced))
            tokens.append(ids)
            logprobs.append(logprob)
        run = torch.stack(tokens, 1)
        self._output_tokens[slots] = run.gather(1, accepted[:, None] - 1)[:, 0]
        self._new_seq_lens[slots] = lens + accepted
        accept_lens, lens_in, bonus_in = (x.int().numpy() for x in (accepted, lens, bonus))
        return StepResult(run.int().numpy(), accept_lens, lens_in, bonus_in, torch.stack(logprobs, 1).numpy())
