"""What can be done to a Batch: make, filter, merge. Fields are replaced, never written into."""

from __future__ import annotations

import numpy as np

from jaxoverlap.core import Batch, ForwardMode, Request
from jaxoverlap.memory.slots import SlotTable


def empty_batch(is_full: bool = False) -> Batch:
    """The running batch when nothing runs."""
    return _batch(ForwardMode.DECODE, is_full=is_full)


def idle_batch() -> Batch:
    """A DP rank's part in a step of the others."""
    return _batch(ForwardMode.IDLE)


def _batch(mode: ForwardMode, is_full: bool = False) -> Batch:
    none = np.empty(0, np.intp)
    return Batch(mode, [], none, np.empty(0, np.int64), none, is_full=is_full)


def keep_rows(batch: Batch, rows: np.ndarray) -> None:
    """`rows`: indices int [n] of the rows that stay, in the order in which they stay."""
    batch.requests = [batch.requests[i] for i in rows]
    batch.slots, batch.epochs, batch.seq_lens = batch.slots[rows], batch.epochs[rows], batch.seq_lens[rows]
    batch.has_grammar = batch.has_grammar and any(r.grammar is not None for r in batch.requests)
    batch.return_logprob = batch.return_logprob and any(r.return_logprob for r in batch.requests)
    batch.output_details = batch.output_details and has_output_details(batch.requests)


def drop_finished(table: SlotTable, batch: Batch, exclude: tuple[Request | None, ...] = ()) -> None:
    """Drops rows whose request has left its slot, and those of `exclude`."""
    leave = [batch.requests.index(r) for r in exclude if r is not None and r in batch.requests]
    rows = table.rows(batch.slots, batch.epochs)
    if leave or not rows.all_live:
        stay = rows.live.copy()
        stay[leave] = False
        keep_rows(batch, np.flatnonzero(stay))


def merge(batch: Batch, other: Batch) -> None:
    """Appends `other`'s rows."""
    batch.requests = batch.requests + other.requests
    batch.slots = np.concatenate([batch.slots, other.slots])
    batch.epochs = np.concatenate([batch.epochs, other.epochs])
    batch.seq_lens = np.concatenate([batch.seq_lens, other.seq_lens])
    batch.is_prefill_only &= other.is_prefill_only
    batch.has_grammar |= other.has_grammar
    batch.return_logprob |= other.return_logprob
    batch.output_details |= other.output_details


def has_output_details(requests: list[Request]) -> bool:
    return any(r.details is not None and r.details.of_outputs for r in requests)
