"""The one int32 array that goes up with a launch, written by the host and taken apart inside jit; and the one that
comes back.

A packed array is made anew for every launch and never touched again: on CPU a running step may read it in place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxoverlap.core import Launch, Request
from jaxoverlap.device.buckets import Bucket
from jaxoverlap.device.layout import Layout
from jaxoverlap.device.state import PARAM_COLUMNS, Script, params_row

PAGE_WRITES = 256  # entries of one call of the write_pages program


def step_layout(bucket: Bucket, script_len: int, next_ids: bool = False) -> Layout:
    """Of a decode or an extend program. Rows from `prefills` on take their one input id from the FutureMap. `next_ids`:
    an extend program is also told the token behind each row's, where it is known."""
    if bucket.is_decode:
        return Layout(slots=(bucket.rows,), seq_lens=(bucket.rows,), page_writes=(3, bucket.writes))
    return Layout(
        slots=(bucket.rows,),
        seq_lens=(bucket.rows,),
        extend_lens=(bucket.rows,),
        prefills=(1,),
        page_writes=(3, bucket.writes),
        ids=(bucket.tokens,),
        params=(bucket.rows, PARAM_COLUMNS),
        script=(bucket.rows, script_len),
        **({"next_ids": (bucket.rows,)} if next_ids else {}),
    )


def verify_layout(bucket: Bucket, tokens: int, vocab_size: int | None) -> Layout:
    """Of a verify program of `tokens` a row; with a vocabulary it takes masks."""
    shapes: dict[str, tuple[int, ...]] = {"slots": (bucket.rows,), "page_writes": (3, bucket.writes)}
    if vocab_size is not None:
        shapes["mask"] = (bucket.rows, tokens, -(-vocab_size // 32))
    return Layout(**shapes)


def pack_verify(layout: Layout, launch: Launch, page_writes: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """`mask` int32 [B, tokens, words], where the layout has one; None allows everything."""
    packed, f = layout.empty()
    rows = len(launch.slots)
    f["slots"][:rows] = launch.slots
    f["page_writes"][:, : page_writes.shape[1]] = page_writes
    if "mask" in f:
        f["mask"][:] = -1
        if mask is not None:
            f["mask"][:rows] = mask
    return packed


def sample_layout(rows: int, vocab_size: int) -> Layout:
    return Layout(slots=(rows,), seq_lens=(rows,), mask=(rows, -(-vocab_size // 32)))


PAGES_LAYOUT = Layout(page_writes=(3, PAGE_WRITES))


def pack_step(layout: Layout, launch: Launch, page_writes: np.ndarray, script: Script | None) -> np.ndarray:
    """`page_writes` is what is left of the launch's own; at most the bucket's."""
    packed, f = layout.empty()
    rows = len(launch.slots)
    f["slots"][:rows] = launch.slots
    f["seq_lens"][:rows] = launch.seq_lens
    f["page_writes"][:, : page_writes.shape[1]] = page_writes
    if "extend_lens" not in f:
        return packed
    prefills = launch.num_prefill
    f["extend_lens"][:rows] = 1 if launch.extend_lens is None else launch.extend_lens
    f["prefills"][0] = prefills
    if launch.input_ids is not None:
        f["ids"][: len(launch.input_ids)] = launch.input_ids
    for i, request in enumerate(launch.requests[:prefills]):
        f["params"][i] = params_row(request)
        if script is not None:
            f["script"][i] = _script_row(script, request)
        if "next_ids" in f:
            f["next_ids"][i] = _id_at(request, int(launch.seq_lens[i]))
    return packed


def pack_sample(layout: Layout, launch: Launch, mask: np.ndarray | None) -> np.ndarray:
    """`mask` int32 [B, 1, words]; None allows everything."""
    packed, f = layout.empty()
    rows = len(launch.slots)
    f["slots"][:rows] = launch.slots
    f["seq_lens"][:rows] = launch.seq_lens
    f["mask"][:] = -1
    if mask is not None:
        f["mask"][:rows] = mask[:, 0]
    return packed


def next_packed(layout: Layout, fields: dict[str, Any], xp: Any) -> Any:
    """A decode step's array one step later, if its rows stay and take no page: every length one up. `xp` is numpy or
    jax.numpy; host and device get the same."""
    lens = fields["seq_lens"] + xp.minimum(fields["slots"], 1)  # 0 for padding
    return xp.concatenate([fields["slots"], lens, xp.zeros(math.prod(layout.shapes["page_writes"]), xp.int32)])


def unpack_outputs(fetched: np.ndarray, drafts: int | None) -> tuple[np.ndarray, ...]:
    """Of a step's int32 array [*, B]: tokens [B], log-probabilities [B], with poison faults [B]. Of a verify step of
    `drafts`: tokens [B, drafts], log-probabilities, tokens accepted, length and token before the step."""
    if drafts is None:
        return fetched[0], fetched[1].view(np.float32), *fetched[2:]
    logprobs = fetched[drafts : 2 * drafts].view(np.float32)
    return fetched[:drafts].T, logprobs.T, *fetched[2 * drafts :]


def pack_pages(page_writes: np.ndarray) -> np.ndarray:
    packed, f = PAGES_LAYOUT.empty()
    f["page_writes"][:, : page_writes.shape[1]] = page_writes
    return packed


def _id_at(request: Request, position: int) -> int:
    """Its token there, 0 where there is none yet."""
    known = request.prompt_ids, request.output_ids
    for ids in known:
        if position < len(ids):
            return int(ids[position])
        position -= len(ids)
    return 0


def _script_row(script: Script, request: Request) -> np.ndarray:
    row = np.full(script.length, -1, np.int32)
    tokens = script.tokens(request)
    if tokens is not None:
        forced = np.asarray(tokens, np.int32)[: script.length]
        row[: len(forced)] = forced
    return row
