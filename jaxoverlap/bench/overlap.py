"""Normal loop against overlap loop on the simulated device, over ratios of host work to step time. Imports no jax.

The host work is the scheduler's own and, behind each turn, a busy loop that fills it up to the wanted time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.bench.load import Load
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Runner, StepResult, Sync, Turn, Wait
from jaxoverlap.device.simulated import SimulatedRanks, simulate
from jaxoverlap.driver import Driver, Exchange
from jaxoverlap.progress import Report, silent

RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.25, 1.5)  # host / device
BATCH, PROMPT, CONTEXT, VOCAB = 8, 16, 4096, 1000
SKIP = 3  # turns at the beginning of each stretch: the device had been idle
ROUNDS = 4


class BusyDriver(Driver):
    """Keeps the host busy in each turn until it has worked for `host_s` seconds, waiting not counted."""

    def __init__(self, runner: Runner, host_s: float) -> None:
        super().__init__(runner)
        self.host_s = host_s
        self.begins: list[float] = []
        self.waits: list[float] = []  # seconds of each turn
        self._waited = 0.0

    def turn(self, turn: Turn) -> None:
        clock = time.perf_counter
        begin = clock()
        self.begins.append(begin)
        self._waited = 0.0
        super().turn(turn)
        self.waits.append(self._waited)
        end = begin + self._waited + self.host_s
        while clock() < end:
            pass

    def wait(self, ask: Wait) -> StepResult:
        begin = time.perf_counter()
        result = super().wait(ask)
        self._waited += time.perf_counter() - begin
        return result

    def sync(self, ask: Sync) -> np.ndarray:
        begin = time.perf_counter()
        facts = super().sync(ask)
        self._waited += time.perf_counter() - begin
        return facts


@dataclass(slots=True)
class Side:
    """One loop on its own simulated device."""

    load: Load
    driver: BusyDriver
    steps: list[float] = field(default_factory=list)  # seconds from turn to turn
    host: list[float] = field(default_factory=list)  # of them not waited

    @classmethod
    def make(
        cls,
        normal: bool,
        host_s: float,
        device_ms: float,
        turns: int,
        dp_size: int = 1,
        exchange: Callable[[SimulatedRanks], Exchange] | None = None,
    ) -> Side:
        """`exchange`: of several ranks, for the devices that it is given."""
        config = EngineConfig(
            device="simulated",
            step_ms=device_ms,
            context_length=CONTEXT,
            max_running_requests=BATCH,
            max_total_tokens=BATCH * (PROMPT + turns + 64),
            chunked_prefill_size=-1,
            disable_overlap_schedule=normal,
            dp_size=dp_size,
            enable_dp_attention=dp_size > 1,
        )
        _, runner, _ = simulate(config)
        driver = BusyDriver(runner, host_s)
        if exchange is not None:
            assert isinstance(runner, SimulatedRanks)
            driver.exchange = exchange(runner)
        load = Load(
            config,
            driver,
            context_length=CONTEXT,
            vocab_size=VOCAB,
            count=BATCH,
            prompt_len=PROMPT,
            max_new_tokens=turns + 32,
            ignore_eos=True,
        )
        load.turn_until_decoding(BATCH)
        return cls(load, driver)

    def run(self, turns: int) -> None:
        driver = self.driver
        driver.begins.clear()
        driver.waits.clear()
        self.load.turn(turns)
        steps = [b - a for a, b in pairwise(driver.begins)]
        self.steps += steps[SKIP:]
        self.host += [step - wait for step, wait in zip(steps, driver.waits)][SKIP:]


def measure(
    ratios: Sequence[float] = RATIOS, device_ms: float = 8.0, turns: int = 120, report: Report = silent
) -> list[dict[str, float]]:
    """A row for each ratio; milliseconds, medians. `turns` of each loop, in stretches that alternate. `host_ms` is the
    normal loop's, as measured; `hidden` = (normal_ms - overlap_ms) / min(host_ms, device_ms)."""
    rows = []
    stretch = turns // ROUNDS + SKIP + 1
    for i, ratio in enumerate(ratios):
        report("measure", i, len(ratios))
        sides = [Side.make(normal, ratio * device_ms / 1e3, device_ms, ROUNDS * stretch) for normal in (True, False)]
        for r in range(ROUNDS):
            for side in sides if r % 2 == 0 else sides[::-1]:
                side.run(stretch)
        normal, overlap = (1e3 * np.array(side.steps) for side in sides)
        host_ms = 1e3 * float(np.median(sides[0].host))
        normal_ms, overlap_ms = float(np.median(normal)), float(np.median(overlap))
        rows.append(
            {
                "host_ms": host_ms,
                "device_ms": device_ms,
                "normal_ms": normal_ms,
                "overlap_ms": overlap_ms,
                "hidden": (normal_ms - overlap_ms) / min(host_ms, device_ms),
                "of_bound": overlap_ms / max(host_ms, device_ms),
                "normal_p90_ms": float(np.percentile(normal, 90)),
                "overlap_p90_ms": float(np.percentile(overlap, 90)),
            }
        )
    report("measure", len(ratios), len(ratios))
    return rows


def show(console: Console, rows: list[dict[str, float]]) -> None:
    title = f"ms a decode step, p50 / p90; the simulated device takes {rows[0]['device_ms']:g}; max: of host and device"
    table = Table(title=title, title_justify="left")
    for name in ("host / device", "host", "normal", "overlap", "overlap / max", "host hidden"):
        table.add_column(name, justify="right")
    for x in rows:
        table.add_row(
            f"{x['host_ms'] / x['device_ms']:.2f}",
            f"{x['host_ms']:.2f}",
            f"{x['normal_ms']:.2f} / {x['normal_p90_ms']:.2f}",
            f"{x['overlap_ms']:.2f} / {x['overlap_p90_ms']:.2f}",
            f"{x['of_bound']:.3f}",
            f"{100 * x['hidden']:.0f} %",
        )
    console.print(table)
