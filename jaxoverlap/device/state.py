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
from jaxoverlap.kernels.future_map import POISON
from jaxoverlap.kernels.sample import RowParams

# Columns of `State.params`; the floats' and the seed's bits are stored as int32.
TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED, PROMPT_LEN = range(6)
PARAM_COLUMNS = 6


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "output_tokens", "new_seq_lens", "page_table", "params", "script"],
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
    script: jax.Array | None  # int32 [rows, N], see Script


@dataclass(frozen=True)
class Script:
    """Forced output tokens, for tests and replay: `tokens(request)` gives those of a request, by output index (None:
    none), and is asked when the request is prefilled. An index past `length`, or a negative id, is sampled freely."""

    length: int
    tokens: Callable[[Request], Sequence[int] | None]


def initial_state(
    cache_shapes: Sequence[jax.ShapeDtypeStruct], *, rows: int, pages: int, poison: bool, script_len: int
) -> State:
    start = POISON if poison else 0
    return State(
        cache=tuple(jnp.zeros(s.shape, s.dtype) for s in cache_shapes),
        output_tokens=jnp.full((rows,), start, jnp.int32),
        new_seq_lens=jnp.full((rows,), start, jnp.int32),
        page_table=jnp.zeros((rows, pages), jnp.int32),
        params=jnp.zeros((rows, PARAM_COLUMNS), jnp.int32),
        script=jnp.full((rows, script_len), -1, jnp.int32) if script_len else None,
    )


def params_row(request: Request) -> np.ndarray:
    """int32 [PARAM_COLUMNS] of a request."""
    p = request.params
    out = np.empty(PARAM_COLUMNS, np.int32)
    out[TEMPERATURE : MIN_P + 1] = np.array((p.temperature, p.top_p, p.min_p), np.float32).view(np.int32)
    out[TOP_K] = min(p.top_k, np.iinfo(np.int32).max)
    out[SEED] = np.uint32(request.seed).view(np.int32)
    out[PROMPT_LEN] = request.prompt_len
    return out


def row_params(columns: jax.Array) -> RowParams:
    """From rows of `State.params`, int32 [B, PARAM_COLUMNS]."""
    floats = lax.bitcast_convert_type(columns[:, TEMPERATURE : MIN_P + 1], jnp.float32)
    seed = lax.bitcast_convert_type(columns[:, SEED], jnp.uint32)
    return RowParams(floats[:, TEMPERATURE], floats[:, TOP_P], floats[:, MIN_P], columns[:, TOP_K], seed)
