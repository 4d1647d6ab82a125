"""The device state: one pytree, donated to every step, so that it is updated in place and lives once.

Rows are request slots, `max_running_requests` + 1 of them; row 0 is the padding row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxoverlap.core import Request
from jaxoverlap.device.adjustments import Tables
from jaxoverlap.kernels.future_map import POISON
from jaxoverlap.kernels.sample import Adjustments, RowParams

# Columns of `State.params`; the floats' and the seed's bits are stored as int32. NEEDED: the row has adjustments;
# COUNT_FROM: the position from which on its sampled tokens count as outputs; LOGPROB: its log-probabilities are wanted.
FLOATS = TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION = range(6)
TOP_K, SEED, PROMPT_LEN, NEEDED, MIN_NEW, COUNT_FROM, LOGPROB = range(len(FLOATS), 13)
PARAM_COLUMNS = 13


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache",
        "output_tokens",
        "new_seq_lens",
        "page_table",
        "params",
        "tables",
        "script",
        "history",
        "draft_cache",
        "draft_hidden",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class State:
    """`output_tokens` and `new_seq_lens` are the FutureMap: what a slot's latest step sampled, and the tokens it then
    had in the cache. A decode step takes its input from there, so the host need not have seen it."""

    cache: tuple[jax.Array, ...]  # the model's, flat
    output_tokens: jax.Array  # int32 [rows]
    new_seq_lens: jax.Array  # int32 [rows]
    page_table: jax.Array  # int32 [rows, pages]
    params: jax.Array  # int32 [rows, PARAM_COLUMNS]
    tables: Tables  # of rows with adjustments
    script: jax.Array | None  # int32 [rows, N], see Script
    history: jax.Array | None = None  # int32 [locations of the cache], the token at each; with a speculator
    draft_cache: tuple[jax.Array, ...] = ()  # a draft model's own, in the same locations
    draft_hidden: jax.Array | None = None  # [rows, hidden] of each row's last token in the cache; with an EAGLE head


@dataclass(frozen=True)
class Script:
    """Forced output tokens, for tests and replay: `tokens(request)` gives those of a request, by output index (None:
    none), and is asked when the request is prefilled. An index past `length`, or a negative id, is sampled freely."""

    length: int
    tokens: Callable[[Request], Sequence[int] | None]


def initial_state(
    cache_shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    rows: int,
    pages: int,
    vocab_size: int,
    poison: bool,
    script_len: int,
    history_locs: int = 0,
    draft_shapes: Sequence[jax.ShapeDtypeStruct] = (),
    draft_hidden: jax.ShapeDtypeStruct | None = None,
) -> State:
    """`history_locs`: locations of the cache, where the state keeps the tokens in them."""
    start = POISON if poison else 0
    return State(
        cache=tuple(jnp.zeros(s.shape, s.dtype) for s in cache_shapes),
        output_tokens=jnp.full((rows,), start, jnp.int32),
        new_seq_lens=jnp.full((rows,), start, jnp.int32),
        page_table=jnp.zeros((rows, pages), jnp.int32),
        params=jnp.zeros((rows, PARAM_COLUMNS), jnp.int32),
        tables=Tables.empty(rows, vocab_size),
        script=jnp.full((rows, script_len), -1, jnp.int32) if script_len else None,
        history=jnp.zeros((history_locs,), jnp.int32) if history_locs else None,
        draft_cache=tuple(jnp.zeros(s.shape, s.dtype) for s in draft_shapes),
        draft_hidden=None if draft_hidden is None else jnp.zeros(draft_hidden.shape, draft_hidden.dtype),
    )


def params_row(request: Request) -> np.ndarray:
    """int32 [PARAM_COLUMNS] of a request."""
    p = request.params
    out = np.empty(PARAM_COLUMNS, np.int32)
    floats = p.temperature, p.top_p, p.min_p, p.frequency_penalty, p.presence_penalty, p.repetition_penalty
    out[: len(FLOATS)] = np.array(floats, np.float32).view(np.int32)
    out[TOP_K] = min(p.top_k, np.iinfo(np.int32).max)
    out[SEED] = np.uint32(request.seed).view(np.int32)
    out[PROMPT_LEN] = request.prompt_len
    out[NEEDED] = bool(p.adjustments)
    out[MIN_NEW] = p.min_new_tokens
    out[COUNT_FROM] = request.prompt_len + request.output_len
    out[LOGPROB] = request.return_logprob
    return out


def row_params(columns: jax.Array) -> RowParams:
    """From rows of `State.params`, int32 [B, PARAM_COLUMNS]."""
    floats = _floats(columns)
    seed = lax.bitcast_convert_type(columns[:, SEED], jnp.uint32)
    return RowParams(
        temperature=floats[:, TEMPERATURE],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        top_k=columns[:, TOP_K],
        seed=seed,
        logprob=columns[:, LOGPROB] == 1,
    )


def row_adjustments(tables: Tables, slots: jax.Array, columns: jax.Array, positions: jax.Array) -> Adjustments:
    """For the tokens at `positions` int32 [B] of `slots`, whose rows of `State.params` are `columns`."""
    floats = _floats(columns)
    return Adjustments(
        slots=slots,
        needed=columns[:, NEEDED] == 1,
        frequency=floats[:, FREQUENCY],
        presence=floats[:, PRESENCE],
        repetition=floats[:, REPETITION],
        below_min=positions - columns[:, PROMPT_LEN] < columns[:, MIN_NEW],
        counts=tables.counts,
        bias=tables.bias,
        stops=tables.stops,
    )


def counted(columns: jax.Array, positions: jax.Array) -> jax.Array:
    """bool [B]: the token sampled for the position is an output that adjustments must know, not the sample of a chunk
    in the middle of a prompt."""
    return (columns[:, NEEDED] == 1) & (positions >= columns[:, COUNT_FROM])


def _floats(columns: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(columns[:, : len(FLOATS)], jnp.float32)
