"""RankMesh: the devices of the data-parallel ranks, and arrays that lie on all of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.load import Put
from jaxoverlap.checkpoint.tree import named_leaves
from jaxoverlap.models.sharding import AXIS, MeshRanks, Split

SAMPLES = 1024  # elements of each parameter that the fingerprint reads


class RankMesh:
    """One device a rank, in the order of ranks; those of several processes under jax.distributed.

    `local` are the places of this process's ranks, which follow each other. An array of all ranks is made of equal
    shares, rank after rank along an axis; no share is ever anywhere but on its rank's device.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = list(devices)
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        here = [rank for rank, d in enumerate(self.devices) if d.process_index == jax.process_index()]
        if not here:
            raise ValueError(f"process {jax.process_index()} has none of the {len(self.devices)} ranks' devices")
        self.local = range(here[0], here[-1] + 1)
        self.fingerprint = 0  # of the parameters that have been placed

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def ranks(self) -> MeshRanks:
        """What a model asks of these ranks."""
        return MeshRanks(self.size)

    def sharding(self, axis: int | None = 0) -> NamedSharding:
        """Of arrays whose shares follow each other along `axis`; None: every rank has the whole."""
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        return NamedSharding(self.mesh, spec)

    def join(self, shares: Sequence[Any], axis: int | None = 0) -> jax.Array:
        """One array of all ranks, of what the local ones hold, in their order; NumPy shares are copied."""
        shape = list(shares[0].shape)
        if axis is not None:
            shape[axis] *= self.size
        placed = [jax.device_put(x, self.devices[rank]) for rank, x in zip(self.local, shares, strict=True)]
        return jax.make_array_from_single_device_arrays(tuple(shape), self.sharding(axis), placed)

    def put(self, rows: Sequence[np.ndarray]) -> jax.Array:
        """`join` for small arrays of the host that change with every launch: one transfer, half the time."""
        return jax.make_array_from_process_local_data(self.sharding(), np.concatenate(rows))

    def share(self, array: jax.Array, i: int) -> jax.Array:
        """That of the i-th local rank, where it lies."""
        return array.addressable_data(i)

    def placing(self, model: Any) -> Put:
        """Gives each rank its share of a model's parameters, for checkpoint/load.py. `model` may be one of shapes.
        Raises CheckpointError naming a parameter that does not divide."""
        splits: Mapping[str, Split] = model.splits()
        for name, leaf in named_leaves(model).items():
            if name in splits:
                try:
                    splits[name].check(leaf.shape, self.size)
                except ValueError as e:
                    raise CheckpointError(f"dp_size {self.size}: parameter {name}: {e}") from None

        def put(name: str, read: Callable[[], np.ndarray]) -> jax.Array:
            whole, split = read(), splits.get(name)
            some = whole.reshape(-1)[:: max(1, whole.size // SAMPLES)]
            self.fingerprint = zlib.crc32(some.tobytes(), self.fingerprint)
            if split is None:
                return self.join([whole] * len(self.local), None)
            return self.join([split.share(whole, rank, self.size) for rank in self.local], split.axis)

        return put
