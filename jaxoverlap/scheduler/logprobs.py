"""Details of log-probabilities in a turn: which places of a prompt a launch tells of, and where what came is kept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxoverlap.core import Batch, Launch, StepResult


def input_spans(batch: Batch) -> np.ndarray | None:
    """int32 [B, 2]: first and end of the places in each row's chunk whose logits tell of the prompt token behind them.
    None where no row has such."""
    if not (batch.return_logprob and batch.mode.is_extend):
        return None
    assert batch.prefix_lens is not None
    spans = np.zeros((len(batch), 2), np.int32)
    for i, r in enumerate(batch.requests):
        if r.details is not None:
            prefix = batch.prefix_lens[i]
            spans[i] = np.subtract(r.details.places(int(prefix), int(batch.seq_lens[i])), prefix)
    return spans if (spans[:, 0] < spans[:, 1]).any() else None


def add_input_details(launch: Launch, result: StepResult) -> None:
    """Keeps what came for the prompts' tokens, also of a row retracted meanwhile: it is as true as before."""
    table, begin = result.input_details, 0
    if table is None:
        return
    assert launch.input_spans is not None
    assert launch.prefix_lens is not None
    for i, (first, end) in enumerate(launch.input_spans.tolist()):
        details = launch.requests[i].details
        if details is not None and first < end:
            details.add_inputs(int(launch.prefix_lens[i]) + first, table, begin, begin + end - first)
        begin += end - first


def add_output_details(launch: Launch, result: StepResult, rows: Iterable[int]) -> None:
    """Keeps what came for the tokens that these rows of the launch sampled."""
    if result.output_details is None:
        return
    for i in rows:
        details = launch.requests[i].details
        if details is not None and details.of_outputs:
            details.add_output(result.output_details, i)
