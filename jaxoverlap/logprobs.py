"""Details: log-probabilities beyond those of the sampled tokens, that is of the prompt's tokens, of the most likely ids
and of chosen ids. What a request is told of them follows SGLang 0.5.14 (logprob_result_processor). Imports no jax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Entry = tuple[float | None, int, None]  # log-probability, id, and SGLang's place for a text


@dataclass(frozen=True, eq=False, slots=True)
class LogprobTable:
    """Details at N places, under the model's unchanged logits; K is the setting `max_logprobs`."""

    top: np.ndarray  # float32 [N, K], falling; the lower id first among equals
    top_ids: np.ndarray  # int32 [N, K]
    chosen: np.ndarray  # float32 [N, K], of the request's own ids, in their order
    following: np.ndarray | None = None  # float32 [N], of the prompt token behind each place; None for outputs


@dataclass(eq=False, slots=True)
class LogprobDetails:
    """What one request wants to be told, and what of it has come; it outlives the slot, so that nothing is lost or told
    twice after a retraction.

    `start` is SGLang's resolved logprob_start_len: the first prompt token that is told of. The prompt's length, or -1,
    which limits no prefix match either: none.
    """

    prompt_ids: np.ndarray  # int32
    start: int
    top_num: int = 0
    token_ids: tuple[int, ...] = ()
    inputs: list[LogprobTable] = field(default_factory=list)  # of the places from `start` on, in order
    num_inputs: int = 0  # places in `inputs`
    outputs: list[LogprobTable] = field(default_factory=list)  # one place for each output token
    prompt_done: bool = False  # a step has read the whole prompt and its result is handled

    @property
    def of_outputs(self) -> bool:
        return self.top_num > 0 or bool(self.token_ids)

    @property
    def of_inputs(self) -> bool:
        return 0 <= self.start < len(self.prompt_ids)

    def places(self, begin: int, end: int) -> tuple[int, int]:
        """Of the context's places begin..end, first and end of those whose logits tell of the prompt token behind."""
        if not self.of_inputs:
            return begin, begin
        first = max(begin, self.start)
        return first, max(first, min(end, len(self.prompt_ids) - 1))

    def add_inputs(self, position: int, table: LogprobTable, begin: int, end: int) -> None:
        """Rows begin..end of `table` are the prompt's places from `position` on; those known from before a retraction
        are passed over."""
        begin += self.start + self.num_inputs - position
        if begin < end:
            self.inputs.append(self._own(table, begin, end))
            self.num_inputs += end - begin

    def add_output(self, table: LogprobTable, row: int) -> None:
        self.outputs.append(self._own(table, row, row + 1))

    def _own(self, table: LogprobTable, begin: int, end: int) -> LogprobTable:
        """Copies: the step's whole table need not stay."""
        rows, count = slice(begin, end), len(self.token_ids)
        return LogprobTable(
            table.top[rows, : self.top_num].copy(),
            table.top_ids[rows, : self.top_num].copy(),
            table.chosen[rows, :count].copy(),
            None if table.following is None else table.following[rows].copy(),
        )


class LogprobReport:
    """A request's details as its caller sees them, in SGLang's shape; grows with a stream's results."""

    def __init__(self, details: LogprobDetails) -> None:
        self._details = details
        self._inputs: dict[str, list[Any]] | None = None
        self._output_top: list[list[Entry]] = []
        self._output_chosen: list[list[Entry]] = []

    def meta(self, completion_tokens: int) -> dict[str, list[Any]]:
        """The entries of `meta_info` once that many output tokens are told. A request that generates none is told what
        would follow its prompt, as SGLang's prefill-only ones are."""
        d = self._details
        for table in d.outputs[len(self._output_top) : max(completion_tokens, 1)]:
            self._output_top += _tops(table)
            self._output_chosen += _chosen(table, d.token_ids)
        if self._inputs is None and d.prompt_done:
            self._inputs = self._of_prompt()
        meta = {"input_token_logprobs": self._input("token")}
        if d.top_num:
            meta |= {"input_top_logprobs": self._input("top"), "output_top_logprobs": self._output_top.copy()}
        if d.token_ids:
            meta["input_token_ids_logprobs"] = self._input("token_ids")
            meta["output_token_ids_logprobs"] = self._output_chosen.copy()
        return meta

    def _input(self, kind: str) -> list[Any]:
        return [] if self._inputs is None else self._inputs[kind].copy()

    def _of_prompt(self) -> dict[str, list[Any]]:
        """The first token told of has no log-probability, whatever stands before it."""
        d = self._details
        if not d.of_inputs:
            return {"token": [], "top": [], "token_ids": []}
        first, *ids = d.prompt_ids[d.start :].tolist()
        values = [x for table in d.inputs if table.following is not None for x in table.following.tolist()]
        return {
            "token": [(None, first, None), *((x, i, None) for x, i in zip(values, ids, strict=True))],
            "top": [None, *(entries for table in d.inputs for entries in _tops(table))],
            "token_ids": [None, *(entries for table in d.inputs for entries in _chosen(table, d.token_ids))],
        }


def _tops(table: LogprobTable) -> list[list[Entry]]:
    return [_entries(values, ids) for values, ids in zip(table.top.tolist(), table.top_ids.tolist())]


def _chosen(table: LogprobTable, ids: tuple[int, ...]) -> list[list[Entry]]:
    return [_entries(values, ids) for values in table.chosen.tolist()]


def _entries(values: Iterable[float], ids: Iterable[int]) -> list[Entry]:
    return [(value, i, None) for value, i in zip(values, ids)]
