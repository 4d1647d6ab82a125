"""The slot table: every number of a resident request, as NumPy columns indexed by slot.

A turn works on these columns with the batch's array of slots, not on requests one by one. Row 0 is the padding row.
Slots, lengths and places are np.intp; one array indexes at a time, and no operator works in place. NumPy's other ways
cost a turn 0.1-0.2 ms where a model has emptied the caches (BUILD_NOTES.md, Cold caches).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxoverlap.core import Request

STOP_COLUMNS = 32  # stop ids of a row that are compared as columns
NO_STOP = -1
MOST_TOKENS = 1 << 32  # of all slots together: the columns are memory of the host, taken as it is used


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """What the table says of a batch's rows until its `version` moves; gathered once for many turns."""

    slots: np.ndarray  # intp [B]
    epochs: np.ndarray  # int64 [B]
    version: int
    live: np.ndarray  # bool [B]: the row's request still holds the slot
    all_live: bool
    starts: np.ndarray  # intp [B], place of the first output in the flattened `tokens`
    caps: np.ndarray  # intp [B], max_new
    stops: tuple[np.ndarray, ...]  # int32 [B] each; a row with fewer stop ids has NO_STOP there
    by_hand: np.ndarray | None  # bool [B]; None: no row
    streams_each: bool  # every row streams every token, and none is looked at by hand
    streams_none: bool


class SlotTable:
    """`num_slots` requests of up to `context_length` tokens (+ `slack` for runs of speculation past a cap). Raises
    ValueError above MOST_TOKENS altogether."""

    def __init__(self, num_slots: int, context_length: int, page_size: int, slack: int = 0) -> None:
        rows, capacity = num_slots + 1, context_length + slack + 1
        if rows * capacity > MOST_TOKENS:
            raise ValueError(
                f"max_running_requests {num_slots} times context_length {context_length} is above {MOST_TOKENS} tokens"
            )
        self.num_slots = num_slots
        self.page_size = page_size
        self.tokens = np.zeros((rows, capacity), np.int32)  # prompt, then outputs
        self.logprobs = np.zeros((rows, capacity), np.float32)  # of the token in the same place
        self._flat_tokens, self._flat_logprobs = self.tokens.reshape(-1), self.logprobs.reshape(-1)
        self.page_table = np.zeros((rows, -(-capacity // page_size)), np.int32)
        self._flat_page_table = self.page_table.reshape(-1)
        self.prompt_len = np.zeros(rows, np.intp)
        self.output_len = np.zeros(rows, np.intp)  # committed output tokens
        self.committed_len = np.zeros(rows, np.intp)  # tokens whose KV is written or being written
        self.allocated_len = np.zeros(rows, np.intp)  # tokens that have a place in the row's pages
        self.verify_len = np.zeros(rows, np.intp)  # length before the last verify step, as far as the host has heard
        self.max_new = np.zeros(rows, np.intp)
        self.epoch = np.zeros(rows, np.int64)  # moves on when the slot is freed
        self.stop_ids = np.full((rows, 4), NO_STOP, np.int32)
        self.stream = np.zeros(rows, bool)
        self.stream_interval = np.ones(rows, np.intp)
        self.by_hand = np.zeros(rows, bool)  # stops by text, grammar or a pending abort: Python looks at each token
        self._free = deque(range(1, rows))
        self._writes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.version = 0  # moves when a slot is taken, left or looked at by hand
        self._rows: Rows | None = None

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
        stops_by_text = bool(request.params.stop or request.params.stop_regex)
        many_stops = len(request.stop_ids) > STOP_COLUMNS
        self.by_hand[slot] = many_stops or stops_by_text or request.grammar is not None or request.to_finish is not None
        request.slot, request.table = slot, self
        self.version += 1

    def look_at(self, request: Request) -> None:
        """From now on Python looks at each token of the request."""
        self.by_hand[request.slot] = True
        self.version += 1

    def detach(self, request: Request) -> None:
        """Takes the slot back; the request keeps its outputs."""
        slot = request.slot
        request.kept_ids = self.outputs(slot).copy()
        request.kept_logprobs = self.output_logprobs(slot).copy()
        request.slot, request.table = 0, None
        self.epoch[slot] += 1
        self.version += 1
        self._free.append(slot)

    def rows(self, slots: np.ndarray, epochs: np.ndarray) -> Rows:
        """Gathered anew only where the arrays or the version are others than last time."""
        rows = self._rows
        if rows is None or rows.version != self.version or rows.slots is not slots or rows.epochs is not epochs:
            rows = self._rows = self._gather(slots, epochs)
        return rows

    def _gather(self, slots: np.ndarray, epochs: np.ndarray) -> Rows:
        live = self.epoch[slots] == epochs
        stops = self.stop_ids[slots]
        by_hand, stream = self.by_hand[slots], self.stream[slots]
        some_by_hand = bool(by_hand.any())
        each = stream & (self.stream_interval[slots] == 1)
        return Rows(
            slots=slots,
            epochs=epochs,
            version=self.version,
            live=live,
            all_live=bool(live.all()),
            starts=self._starts(slots),
            caps=self.max_new[slots],
            stops=tuple(np.ascontiguousarray(ids) for ids in stops.T if (ids != NO_STOP).any()),
            by_hand=by_hand if some_by_hand else None,
            streams_each=bool(each.all()) and not some_by_hand,
            streams_none=not stream.any(),
        )

    def outputs(self, slot: int) -> np.ndarray:
        n = self.prompt_len[slot]
        return self.tokens[slot, n : n + self.output_len[slot]]

    def output_logprobs(self, slot: int) -> np.ndarray:
        n = self.prompt_len[slot]
        return self.logprobs[slot, n : n + self.output_len[slot]]

    def append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """One more output token for each row; `slots` intp [n], `tokens` int32 [n], `logprobs` float32 [n]."""
        self._append(slots, self._starts(slots), tokens, logprobs)

    def append_rows(self, rows: Rows, tokens: np.ndarray, logprobs: np.ndarray | None) -> np.ndarray:
        """`append` for a batch; returns intp [B], the output tokens that each row then has."""
        return self._append(rows.slots, rows.starts, tokens, logprobs)

    def last_tokens(self, rows: Rows, lens: np.ndarray) -> np.ndarray:
        """int32 [B]: each row's output token number `lens`, counted from 1."""
        return self._flat_tokens[rows.starts + (lens - 1)]

    def set_pages(self, slots: np.ndarray, index: np.ndarray, pages: np.ndarray) -> None:
        """page_table[slots, index] = pages, and the change goes to the device with the next launch. Each index lies
        within its row: nothing checks it here."""
        self._flat_page_table[self._entries(slots, index)] = pages
        self._writes.append((slots, index, pages))

    def take_page_writes(self) -> np.ndarray:
        """int32 [3, N]: slot, index, page of every entry set since the last call. An entry set twice appears twice
        with its last page, so that the order of a scatter does not matter."""
        writes, self._writes = self._writes, []
        if not writes:
            return np.empty((3, 0), np.int32)
        if len(writes) == 1:  # a decode step: one page for each of some rows
            slots, index, pages = writes[0]
        else:
            slots = np.concatenate([w[0] for w in writes])
            index = np.concatenate([w[1] for w in writes])
            pages = self._flat_page_table[self._entries(slots, index)]
        out = np.empty((3, len(slots)), np.int32)
        out[0], out[1], out[2] = slots, index, pages
        return out

    def _append(
        self, slots: np.ndarray, starts: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None
    ) -> np.ndarray:
        lens = self.output_len[slots]
        at = starts + lens
        self._flat_tokens[at] = tokens
        if logprobs is not None:
            self._flat_logprobs[at] = logprobs
        lens = lens + 1
        self.output_len[slots] = lens
        return lens

    def _starts(self, slots: np.ndarray) -> np.ndarray:
        return slots * self.tokens.shape[1] + self.prompt_len[slots]

    def _entries(self, slots: np.ndarray, index: np.ndarray) -> np.ndarray:
        return slots * self.page_table.shape[1] + index

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        if len(ids) > STOP_COLUMNS:  # one request's list must not widen every row's: Python looks at each of its tokens
            ids = ()
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            extra = np.full((len(self.stop_ids), len(ids) - width), NO_STOP, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, extra], axis=1)
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(ids)] = ids
