"""What the ranks' exchange costs a turn, and what it leaves of overlap, on simulated devices.

Host form: the exchange runs on the host platform's devices, beside the step. Accelerator form: it takes its turn behind
the running step, as a program on the step's own devices does; a simulated device has no programs, so the host waits
until the device is free and then makes the same exchange.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.bench.overlap import ROUNDS, SKIP, Side
from jaxoverlap.device.simulated import SimulatedRanks
from jaxoverlap.driver import Exchange
from jaxoverlap.parallel.load import want_cpu_devices
from jaxoverlap.parallel.sync import FactExchange
from jaxoverlap.progress import Report, silent

FORMS = ("host", "accelerator")
RATIO = 0.5  # host work / step time


class TimedExchange:
    """`exchange`, and how long each call took, in seconds; with `behind` only when those devices are free."""

    def __init__(self, exchange: Exchange, behind: SimulatedRanks | None = None) -> None:
        self._exchange = exchange
        self._behind = behind
        self.seconds: list[float] = []

    def __call__(self, facts: np.ndarray) -> np.ndarray:
        begin = time.perf_counter()
        if self._behind is not None:
            time.sleep(max(0.0, self._behind.free_at - begin))
        table = self._exchange(facts)
        self.seconds.append(time.perf_counter() - begin)
        return table


def measure(
    ranks: Sequence[int] = (2, 4), device_ms: float = 8.0, turns: int = 120, report: Report = silent
) -> list[dict[str, Any]]:
    """A row for each number of ranks and form; medians. `exchange_us` is what one takes in a turn of the overlap loop,
    `alone_us` with nothing else going on. `hidden` is the share of the host's work that does not lengthen the overlap
    loop's steps: 1 - (overlap_ms - device_ms) / host_ms. Normal loop and overlap loop alternate."""
    want_cpu_devices(max(ranks))
    rows, stretch = [], turns // ROUNDS + SKIP + 1
    cases = [(n, form) for n in ranks for form in FORMS]
    for i, (n, form) in enumerate(cases):
        report("measure", i, len(cases))
        devices = jax.devices("cpu")[:n]
        if len(devices) < n:
            raise ValueError(f"{n} ranks need as many CPU devices, and JAX has started with {len(devices)}")
        gather = FactExchange(devices)
        timed: list[TimedExchange] = []

        def exchange(runner: SimulatedRanks, gather: Exchange, form: str, timed: list[TimedExchange]) -> Exchange:
            timed.append(TimedExchange(gather, runner if form == "accelerator" else None))
            return timed[-1]

        make = partial(exchange, gather=gather, form=form, timed=timed)
        sides = [
            Side.make(normal, RATIO * device_ms / 1e3, device_ms, ROUNDS * stretch, n, make) for normal in (True, False)
        ]
        alone = TimedExchange(gather)
        for _ in range(turns):
            alone(np.zeros((n, 9), np.int64))
        timed[1].seconds.clear()
        for r in range(ROUNDS):
            for side in sides if r % 2 == 0 else sides[::-1]:
                side.run(stretch)
        normal_ms, overlap_ms = (1e3 * float(np.median(side.steps)) for side in sides)
        host_ms = 1e3 * float(np.median(sides[0].host))
        rows.append(
            {
                "ranks": n,
                "form": form,
                "alone_us": 1e6 * float(np.median(alone.seconds)),
                "exchange_us": 1e6 * float(np.median(timed[1].seconds)),
                "exchange_p90_us": 1e6 * float(np.percentile(timed[1].seconds, 90)),
                "host_ms": host_ms,
                "device_ms": device_ms,
                "normal_ms": normal_ms,
                "overlap_ms": overlap_ms,
                "hidden": 1 - (overlap_ms - device_ms) / host_ms,
            }
        )
    report("measure", len(cases), len(cases))
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    title = f"the ranks' exchange; simulated steps of {first['device_ms']:g} ms, host work of {first['host_ms']:.1f} ms"
    table = Table(title=title, title_justify="left")
    for name in ("ranks", "form", "alone (us)", "in a turn (us)", "p90", "normal (ms)", "overlap (ms)", "host hidden"):
        table.add_column(name, justify="left" if name == "form" else "right")
    for x in rows:
        table.add_row(
            str(x["ranks"]),
            x["form"],
            f"{x['alone_us']:.0f}",
            f"{x['exchange_us']:.0f}",
            f"{x['exchange_p90_us']:.0f}",
            f"{x['normal_ms']:.2f}",
            f"{x['overlap_ms']:.2f}",
            f"{100 * x['hidden']:.0f} %",
        )
    console.print(table)
