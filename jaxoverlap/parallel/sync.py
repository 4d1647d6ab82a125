"""The exchange of facts before each launch: an all-gather by pmap, over the ranks' devices or over as many of the host.

On the accelerator the exchange queues behind the running step, and the host waits for both: nothing is hidden any more.
On the host platform's devices it runs beside the step (SGLang gathers on its CPU group for the same reason). Where the
CPU is the accelerator the two are one, since XLA's CPU client runs programs with collectives one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_NAME = "ranks"


class FactExchange:
    """Every rank's facts to every rank. `devices`: one a rank, in the order of ranks; of several processes under
    jax.distributed, each calls with the facts of its own."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._gather: Any = jax.pmap(lambda x: jax.lax.all_gather(x, _NAME), axis_name=_NAME, devices=devices)

    def dispatch(self, facts: np.ndarray) -> jax.Array:
        """Starts the exchange of int [local ranks, facts]; never waits."""
        return self._gather(facts.astype(np.int32))

    def collect(self, gathered: jax.Array) -> np.ndarray:
        """int64 [ranks, facts]; blocks until all have answered."""
        return np.asarray(gathered.addressable_data(0))[0].astype(np.int64)

    def __call__(self, facts: np.ndarray) -> np.ndarray:
        return self.collect(self.dispatch(facts))


def exchange_devices(sync: str, devices: Sequence[jax.Device], overlaps: bool) -> list[jax.Device]:
    """Where the exchange of the ranks of `devices` runs. `sync`: "host", "accelerator", or "auto": the host with
    overlap, as in SGLang. Raises ValueError where the host platform has too few devices."""
    if sync == "accelerator" or (sync == "auto" and not overlaps):
        return list(devices)
    out: list[jax.Device] = []
    taken: dict[int, int] = {}
    for device in devices:
        there = [d for d in jax.devices("cpu") if d.process_index == device.process_index]
        i = taken.get(device.process_index, 0)
        if i >= len(there):
            raise ValueError(
                f"dp_sync host needs a CPU device for each rank of a process, and there are {len(there)}: set "
                "jax_num_cpu_devices before JAX starts"
            )
        taken[device.process_index] = i + 1
        out.append(there[i])
    return out
