"""The programs that give details of log-probabilities: top ids, chosen ids, the prompt's tokens.

They read what a cut step leaves behind (its logits, its hidden states) and touch no state: the next step does not need
them. K is the setting `max_logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxoverlap.core import Launch
from jaxoverlap.device import fetching
from jaxoverlap.device.buckets import Bucket
from jaxoverlap.device.layout import Layout
from jaxoverlap.logprobs import LogprobTable

if TYPE_CHECKING:
    from jaxoverlap.device.programs import Programs

BLOCK = 64  # places whose logits exist at once


class DetailsHandle:
    """A launch's details on their way to the host, copied as its tokens are."""

    def __init__(self, k: int, outputs: jax.Array | None, inputs: jax.Array | None, places: int) -> None:
        self._k = k
        self._outputs, self._inputs, self._places = outputs, inputs, places
        for array in self.arrays:
            fetching.start(array)

    @property
    def arrays(self) -> list[jax.Array]:
        return [x for x in (self._outputs, self._inputs) if x is not None]

    def fetch(self, rows: int) -> tuple[LogprobTable | None, LogprobTable | None]:
        """Of the outputs of a launch of that many rows, and of its inputs; blocks until they are there."""
        outputs = None if self._outputs is None else _unpack(fetching.fetch(self._outputs)[:rows], self._k)
        inputs = None if self._inputs is None else _unpack(fetching.fetch(self._inputs)[: self._places], self._k)
        return outputs, inputs


def launch_details(
    programs: Programs,
    call: Callable[..., Any],
    weights: tuple[jax.Array, ...],
    launch: Launch,
    bucket: Bucket,
    logits: jax.Array,
    hidden: jax.Array | None,
) -> DetailsHandle:
    """`call(program, *arguments)`; logits f32 [B, V] and, of an extend step, hidden [T, D]."""
    outputs, inputs, places, k = None, None, 0, 0
    if launch.output_details:
        program = programs[f"output_logprobs_{bucket.rows}"]
        outputs, k = call(program, logits, pack_output(program.layout, launch)), k_of(program.layout)
    if launch.input_spans is not None:
        program = programs[f"input_logprobs_{bucket.tokens}"]
        packed, places = pack_input(program.layout, launch)
        inputs, k = call(program, weights, hidden, packed), k_of(program.layout)
    return DetailsHandle(k, outputs, inputs, places)


def output_layout(rows: int, k: int) -> Layout:
    return Layout(chosen=(rows, k))


def input_layout(bucket: Bucket, k: int) -> Layout:
    """Place i is token `places[i]` of the launch, in batch row `rows[i]`, followed in its prompt by `following[i]`."""
    block = block_of(bucket)
    places = -(-bucket.tokens // block) * block
    return Layout(count=(1,), places=(places,), rows=(places,), following=(places,), chosen=(bucket.rows, k))


def k_of(layout: Layout) -> int:
    return layout.shapes["chosen"][1]


def block_of(bucket: Bucket) -> int:
    return min(BLOCK, bucket.tokens)


def output_logprobs(layout: Layout) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(logits f32 [B, V], packed) -> int32 [B, 3 K], see `_unpack`."""

    def step(logits: jax.Array, packed: jax.Array) -> jax.Array:
        return _details(logits, layout.fields(packed)["chosen"])

    return step


def input_logprobs(graph: Any, tree: Any, block: int, layout: Layout) -> Callable[..., jax.Array]:
    """(weights, hidden [T, D], packed) -> int32 [places, 3 K + 1], of which the first `count` are real; block by block,
    so that the logits of all places never exist together."""

    def step(weights: tuple[jax.Array, ...], hidden: jax.Array, packed: jax.Array) -> jax.Array:
        f = layout.fields(packed)
        model = nnx.merge(graph, jax.tree.unflatten(tree, weights[: tree.num_leaves]))

        def body(i: jax.Array, out: jax.Array) -> jax.Array:
            places, rows, following = (
                lax.dynamic_slice_in_dim(f[name], i * block, block) for name in ("places", "rows", "following")
            )
            details = _details(model.logits(hidden[places]), f["chosen"][rows], following)
            return lax.dynamic_update_slice_in_dim(out, details, i * block, axis=0)

        (places,), k = layout.shapes["places"], k_of(layout)
        blocks = (f["count"][0] + block - 1) // block
        return lax.fori_loop(0, blocks, body, jnp.zeros((places, 3 * k + 1), jnp.int32))

    return step


def _details(logits: jax.Array, chosen: jax.Array, following: jax.Array | None = None) -> jax.Array:
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = lax.top_k(logits, chosen.shape[1])
    of_chosen = jnp.take_along_axis(logits, chosen, axis=-1)
    columns = [_bits(top - normaliser), top_ids, _bits(of_chosen - normaliser)]
    if following is not None:
        columns.append(_bits(jnp.take_along_axis(logits, following[:, None], axis=-1) - normaliser))
    return jnp.concatenate(columns, axis=1)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _unpack(fetched: np.ndarray, k: int) -> LogprobTable:
    """Of a program's int32 array [N, 3 K], with the following tokens' [N, 3 K + 1]."""
    top, top_ids, chosen = fetched[:, :k], fetched[:, k : 2 * k], fetched[:, 2 * k : 3 * k]
    following = fetched[:, 3 * k].view(np.float32) if fetched.shape[1] > 3 * k else None
    return LogprobTable(top.view(np.float32), top_ids, chosen.view(np.float32), following)


def pack_output(layout: Layout, launch: Launch) -> np.ndarray:
    packed, f = layout.empty()
    _fill_chosen(f["chosen"], launch)
    return packed


def pack_input(layout: Layout, launch: Launch) -> tuple[np.ndarray, int]:
    """The array, and the number of places."""
    assert launch.input_spans is not None
    assert launch.extend_lens is not None
    assert launch.prefix_lens is not None
    packed, f = layout.empty()
    start = at = 0
    for i, (first, end) in enumerate(launch.input_spans.tolist()):
        if first < end:
            places, prefix = slice(at, at + end - first), int(launch.prefix_lens[i])
            f["places"][places] = np.arange(start + first, start + end)
            f["rows"][places] = i
            f["following"][places] = launch.requests[i].prompt_ids[prefix + first + 1 : prefix + end + 1]
            at = places.stop
        start += int(launch.extend_lens[i])
    f["count"][0] = at
    _fill_chosen(f["chosen"], launch)
    return packed, at


def _fill_chosen(chosen: np.ndarray, launch: Launch) -> None:
    """`chosen` int32 [rows, K]. Raises ValueError for a request that wants more than K."""
    limit = chosen.shape[1]
    for i, r in enumerate(launch.requests):
        if r.details is None:
            continue
        if max(r.details.top_num, len(r.details.token_ids)) > limit:
            raise ValueError(f"launch {launch.number}: {r.rid} wants more logprobs than max_logprobs {limit}")
        chosen[i, : len(r.details.token_ids)] = r.details.token_ids
