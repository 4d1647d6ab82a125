"""The slot table: every number of a resident request, as NumPy columns indexed by slot.

A turn works on these columns with the batch's array of slots, not on requests one by one. Row 0 is the padding row.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxoverlap.core import Request

NO_STOP = -1


class SlotTable:
    """`num_slots` requests of up to `context_length` tokens (+ `slack` for runs of speculation past a cap)."""

    def __init__(self, num_slots: int, context_length: int, page_size: int, slack: int = 0) -> None:
        rows, capacity = num_slots + 1, context_length + slack + 1
        self.num_slots = num_slots
        self.page_size = page_size
        self.tokens = np.zeros((rows, capacity), np.int32)  # prompt, then outputs
        self.logprobs = np.zeros((rows, capacity), np.float32)  # of the token in the same place
        self.page_table = np.zeros((rows, -(-capacity // page_size)), np.int32)
        self.prompt_len = np.zeros(rows, np.int32)
        self.output_len = np.zeros(rows, np.int32)  # committed output tokens
        self.committed_len = np.zeros(rows, np.int32)  # tokens whose KV is written or being written
        self.allocated_len = np.zeros(rows, np.int32)  # tokens that have a place in the row's pages
        self.verify_len = np.zeros(rows, np.int32)  # length before the last verify step, as far as the host has heard
        self.max_new = np.zeros(rows, np.int32)
        self.epoch = np.zeros(rows, np.int64)  # moves on when the slot is freed
        self.stop_ids = np.full((rows, 4), NO_STOP, np.int32)
        self.stream = np.zeros(rows, bool)
        self.stream_interval = np.ones(rows, np.int32)
        self.by_hand = np.zeros(rows, bool)  # stop strings, grammar or a pending abort: Python looks at each token
        self._free = deque(range(1, rows))
        self._writes: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_slots(self) -> list[int]:
        return list(self._free)

    def attach(self, request: Request, stream_interval: int) -> None:
        """Gives the request the slot that was freed longest ago and writes its numbers there."""
        slot = self._free.popleft()
        n, kept = request.prompt_len, request.kept_ids
        self.tokens[slot, :n] = request.prompt_ids
        self.tokens[slot, n : n + len(kept)] = kept
        self.logprobs[slot, n : n + len(kept)] = request.kept_logprobs
        self.prompt_len[slot] = n
        self.output_len[slot] = len(kept)
        self.committed_len[slot] = self.allocated_len[slot] = 0
        self.verify_len[slot] = n + len(kept)
        self.max_new[slot] = request.max_new_tokens
        self._set_stop_ids(slot, request.stop_ids)
        self.stream[slot] = request.stream
        self.stream_interval[slot] = stream_interval
        self.by_hand[slot] = bool(request.params.stop) or request.grammar is not None or request.to_finish is not None
        request.slot, request.table = slot, self

    def detach(self, request: Request) -> None:
        """Takes the slot back; the request keeps its outputs."""
        slot = request.slot
        request.kept_ids = self.outputs(slot).copy()
        request.kept_logprobs = self.output_logprobs(slot).copy()
        request.slot, request.table = 0, None
        self.epoch[slot] += 1
        self._free.append(slot)

    def outputs(self, slot: int) -> np.ndarray:
        n = self.prompt_len[slot]
        return self.tokens[slot, n : n + self.output_len[slot]]

    def output_logprobs(self, slot: int) -> np.ndarray:
        n = self.prompt_len[slot]
        return self.logprobs[slot, n : n + self.output_len[slot]]

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """One more output token for each row; `slots`, `tokens` int32 [n], `logprobs` float32 [n]."""
        at = self.prompt_len[slots] + self.output_len[slots]
        self.tokens[slots, at] = tokens
        if logprobs is not None:
            self.logprobs[slots, at] = logprobs
        self.output_len[slots] += 1

    def set_pages(self, slots: np.ndarray, index: np.ndarray, pages: np.ndarray) -> None:
        """page_table[slots, index] = pages, and the change goes to the device with the next launch."""
        self.page_table[slots, index] = pages
        self._writes.append((slots, index))

    def take_page_writes(self) -> np.ndarray:
        """int32 [3, N]: slot, index, page of every entry set since the last call. An entry set twice appears twice
        with its last page, so that the order of a scatter does not matter."""
        if not self._writes:
            return np.empty((3, 0), np.int32)
        slots = np.concatenate([w[0] for w in self._writes])
        index = np.concatenate([w[1] for w in self._writes])
        self._writes = []
        return np.stack([slots, index, self.page_table[slots, index]]).astype(np.int32, copy=False)

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            extra = np.full((len(self.stop_ids), len(ids) - width), NO_STOP, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, extra], axis=1)
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(ids)] = ids
