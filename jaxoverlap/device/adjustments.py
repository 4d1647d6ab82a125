"""Penalties, min_new_tokens and logit_bias on the device: tables by slot, of which only rows that ask for it are read.

The host writes a row's tables when it launches a prefill of such a request, with the outputs that it then has; from
there on each step counts the token that it samples, so that the next one has it whatever the host has seen.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.device.layout import Layout

if TYPE_CHECKING:
    from jaxoverlap.core import Launch, Request

ENTRIES = 256  # ids of one call of the write_adjustments program


@functools.partial(jax.tree_util.register_dataclass, data_fields=["counts", "bias", "stops"], meta_fields=[])
@dataclass(frozen=True)
class Tables:
    """By slot and token id; the rows of requests without adjustments hold anything."""

    counts: jax.Array  # int32 [rows, V], outputs so far
    bias: jax.Array  # f32 [rows, V]
    stops: jax.Array  # int32 [rows, ceil(V / 32)], bits of the ids that min_new_tokens forbids

    @classmethod
    def empty(cls, rows: int, vocab_size: int) -> Tables:
        return cls(
            counts=jnp.zeros((rows, vocab_size), jnp.int32),
            bias=jnp.zeros((rows, vocab_size), jnp.float32),
            stops=jnp.zeros((rows, -(-vocab_size // 32)), jnp.int32),
        )

    def count(self, slots: jax.Array, tokens: jax.Array, counted: jax.Array) -> Tables:
        """With one occurrence more of `tokens` int32 [B] where `counted` bool [B]; those slots are distinct."""
        slots = jnp.where(counted, slots, 0)  # the padding row gets no occurrence, however often it is written
        known = self.counts.at[slots, tokens].get(mode="clip")
        counts = self.counts.at[slots, tokens].set(known + counted, mode="drop")
        return Tables(counts, self.bias, self.stops)


def layout(vocab_size: int) -> Layout:
    return Layout(
        slot=(1,), first=(1,), stops=(-(-vocab_size // 32),), ids=(ENTRIES,), counts=(ENTRIES,), bias=(ENTRIES,)
    )


def write_adjustments(layout: Layout, tables: Tables, packed: jax.Array) -> Tables:
    """`tables` (donated) with the entries of one slot; the `first` of its calls clears the slot's rows."""
    f = layout.fields(packed)
    slot, first = f["slot"][0], f["first"][0] == 1

    def written(table: jax.Array, entries: jax.Array) -> jax.Array:
        row = jnp.where(first, 0, table[slot])
        return table.at[slot].set(row.at[f["ids"]].set(entries, mode="drop"))

    return Tables(
        counts=written(tables.counts, f["counts"]),
        bias=written(tables.bias, jax.lax.bitcast_convert_type(f["bias"], jnp.float32)),
        stops=tables.stops.at[slot].set(f["stops"]),
    )


def launch_adjustments(
    layout: Layout, launch: Launch, vocab_size: int, eos_token_ids: Sequence[int]
) -> Iterator[np.ndarray]:
    """Those of all requests that a launch prefills, but for one in the middle of its prompt: its sample counts
    nowhere."""
    for slot, request in zip(launch.slots.tolist(), launch.requests[: launch.num_prefill]):
        if request.params.adjustments and request is not launch.chunked:
            yield from pack_adjustments(layout, slot, request, vocab_size, eos_token_ids)


def pack_adjustments(
    layout: Layout, slot: int, request: Request, vocab_size: int, eos_token_ids: Sequence[int]
) -> Iterator[np.ndarray]:
    """The arrays of as many calls of write_adjustments as the request needs. Below min_new_tokens the model's EOS ids
    and the request's own stop ids are forbidden, also with ignore_eos, as in SGLang."""
    ids, counts = np.unique(request.output_ids, return_counts=True)
    biases = request.params.logit_bias or {}
    entries = {int(t): (int(c), 0.0) for t, c in zip(ids, counts)}
    for token, bias in biases.items():
        entries[int(token)] = (entries.get(int(token), (0, 0.0))[0], bias)
    stops = np.array([t for t in (*eos_token_ids, *(request.params.stop_token_ids or ())) if t < vocab_size], np.uint32)
    rows = list(entries.items())
    for begin in range(0, max(len(rows), 1), ENTRIES):
        packed, f = layout.empty()
        some = rows[begin : begin + ENTRIES]
        f["slot"][0], f["first"][0] = slot, begin == 0
        np.bitwise_or.at(f["stops"].view(np.uint32), stops // 32, np.uint32(1) << stops % 32)
        f["ids"][:] = vocab_size  # dropped
        f["ids"][: len(some)] = [token for token, _ in some]
        f["counts"][: len(some)] = [count for _, (count, _) in some]
        f["bias"].view(np.float32)[: len(some)] = [bias for _, (_, bias) in some]
        yield packed
