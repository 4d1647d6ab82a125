"""How data-parallel ranks share a model's weights (DP attention).

Each rank computes attention for its own tokens and holds a share of every MLP and of the vocabulary. What needs the
others' shares is computed for all tokens at once: those of all ranks are gathered, each rank computes its part, and the
parts are summed, or put together, on the way back to where the tokens came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "dp"  # of the mesh of ranks
Block = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter is divided: of each of `groups` equal stretches of `axis` (matrices one behind the other), rank r
    of n holds the r-th n-th. `padded`: rows of zeros make it divide. `first_only`: rank 0 holds all of it, the others
    zeros, since it is added once."""

    axis: int = 0
    groups: int = 1
    padded: bool = False
    first_only: bool = False

    def check(self, shape: tuple[int, ...], ranks: int) -> None:
        """Raises ValueError where the axis does not divide."""
        size = shape[self.axis] // self.groups
        if size % ranks and not (self.padded or self.first_only):
            raise ValueError(f"{size} of {list(shape)} does not divide into {ranks} shares")

    def spread(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Shape of all shares, rank after rank along `axis`."""
        self.check(shape, ranks)
        size = shape[self.axis]
        whole = size * ranks if self.first_only else size + (-size % ranks if self.padded else 0)
        return (*shape[: self.axis], whole, *shape[self.axis + 1 :])

    def share(self, array: np.ndarray, rank: int, ranks: int) -> np.ndarray:
        """That of one rank. Raises ValueError as `check` does."""
        self.check(array.shape, ranks)
        if self.first_only:
            return array if rank == 0 else np.zeros_like(array)
        if self.padded:
            widths = [(0, -size % ranks if axis == self.axis else 0) for axis, size in enumerate(array.shape)]
            array = np.pad(array, widths)
        groups = np.split(array, self.groups, self.axis)
        return np.concatenate([np.split(g, ranks, self.axis)[rank] for g in groups], self.axis)


class Ranks:
    """What a model asks of the ranks that share its weights; this one is alone and holds them whole.

    T tokens of a rank, H features, V ids. A block or table is the rank's share.
    """

    size = 1

    def summed(self, block: Block, x: jax.Array) -> jax.Array:
        """x [T, H] -> [T, H], the sum over the ranks of `block` [*, H] -> [*, H]."""
        return block(x)

    def rows(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows [T, H] of the table [V, H], of which a rank holds the r-th share."""
        return table[ids]

    def columns(self, block: Block, x: jax.Array, count: int) -> jax.Array:
        """x [T, H] -> [T, count], the columns of all ranks' `block` [*, H] -> [*, share of the columns]."""
        return block(x)


ALONE = Ranks()


class MeshRanks(Ranks):
    """`size` ranks, one a device of the mesh axis AXIS, inside jax.shard_map."""

    def __init__(self, size: int) -> None:
        self.size = size

    def summed(self, block: Block, x: jax.Array) -> jax.Array:
        parts = block(lax.all_gather(x, AXIS, tiled=True))
        return lax.psum_scatter(parts, AXIS, scatter_dimension=0, tiled=True)

    def rows(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        here = lax.all_gather(ids, AXIS, tiled=True) - lax.axis_index(AXIS) * table.shape[0]
        held = (here >= 0) & (here < table.shape[0])
        found = jnp.where(held[:, None], table[jnp.where(held, here, 0)], 0)
        return lax.psum_scatter(found, AXIS, scatter_dimension=0, tiled=True)

    def columns(self, block: Block, x: jax.Array, count: int) -> jax.Array:
        share = block(lax.all_gather(x, AXIS, tiled=True))
        whole = lax.all_to_all(share, AXIS, split_axis=0, concat_axis=1, tiled=True)
        return whole[:, :count]  # without the rows that made the vocabulary divide
