"""What the call costs that gives the device a decode step, against a bare jitted call with the same leaves and sizes.

On CPU a step starts at once, on the cores that the call is still running on. There a callback holds one of the step's
inputs back, so that the call is measured and not the competition for cores.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from jaxoverlap.bench.load import Load
from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch
from jaxoverlap.device.packing import step_layout
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.device.state import State, initial_state
from jaxoverlap.driver import Driver
from jaxoverlap.loading import ServedModel

PROMPT = 8
HOLD = 0.01  # seconds; longer than a call


@jax.jit
def held(x: jax.Array) -> jax.Array:
    """The same values, a moment later."""

    def wait(value: jax.Array) -> jax.Array:
        time.sleep(HOLD)
        return value

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def hold(state: State) -> State:
    """On CPU, the state with a part that comes a moment later."""
    if jax.default_backend() != "cpu":
        return state
    return dataclasses.replace(state, output_tokens=held(state.output_tokens))


class Bare:
    """A jitted call that takes a step's arguments (weights, donated state, packed array) and gives back the state and
    outputs of the same sizes, untouched."""

    def __init__(self, model: Any, runner: JaxRunner, config: EngineConfig, context_length: int, rows: int) -> None:
        bucket = runner.buckets.for_decode(rows)
        self._weights = tuple(jax.tree.leaves(nnx.split(model)[1]))
        self._state = initial_state(
            model.cache_shapes((runner.num_pages + 1) * config.page_size),
            rows=config.max_running_requests + 1,
            pages=-(-context_length // config.page_size),
            vocab_size=model.config.vocab_size,
            poison=False,
            script_len=0,
        )
        self._packed, _ = step_layout(bucket, 0).empty()

        def step(weights: tuple[jax.Array, ...], state: State, packed: jax.Array) -> tuple[State, jax.Array, jax.Array]:
            return state, packed[: bucket.rows], packed[: bucket.rows].astype(np.float32)

        jitted = jax.jit(step, donate_argnums=1, keep_unused=True)
        self._call = jitted.lower(self._weights, self._state, self._packed).compile()
        self._jitted = jitted

    def time(self, compiled: bool) -> float:
        """Seconds of one call on an idle device; ahead-of-time compiled, as the runner's programs, or jitted."""
        call = self._call if compiled else self._jitted
        self._state = hold(self._state)
        begin = time.perf_counter()
        out = call(self._weights, self._state, self._packed)
        seconds = time.perf_counter() - begin
        self._state = jax.block_until_ready(out)[0]
        return seconds


class LaunchTimer(Driver):
    """Times each decode launch on an idle device."""

    def __init__(self, runner: JaxRunner) -> None:
        super().__init__(runner)
        self._runner = runner
        self.seconds: list[float] = []

    def launch(self, ask: Launch) -> Any:
        if ask.mode.is_decode:
            self._runner._state = hold(self._runner._state)
        begin = time.perf_counter()
        handle = super().launch(ask)
        if ask.mode.is_decode:
            self.seconds.append(time.perf_counter() - begin)
        self._runner.block(handle)
        return handle


def measure(
    config: EngineConfig, model: ServedModel, runner: JaxRunner, batches: Sequence[int], turns: int
) -> dict[str, Any]:
    """{batch: figures}, microseconds, medians; launches and bare calls alternate. `ratio` is to the jitted call."""
    held(jnp.zeros(config.max_running_requests + 1, jnp.int32))  # compiles
    out = {}
    leaves = len(jax.tree.leaves(nnx.split(model.module)[1]))  # type: ignore[attr-defined]
    for batch in batches:
        driver = LaunchTimer(runner)
        own = dataclasses.replace(config, max_running_requests=batch, disable_overlap_schedule=True)
        load = Load(
            own,
            driver,
            context_length=model.context_length,
            vocab_size=model.config.vocab_size,
            count=batch,
            prompt_len=PROMPT,
            max_new_tokens=turns + 16,
            ignore_eos=True,
        )
        load.turn_until_decoding(batch)
        bare = Bare(model.module, runner, config, model.context_length, batch)  # type: ignore[attr-defined]
        jitted, compiled = [], []
        bare.time(True), bare.time(False)
        driver.seconds.clear()
        for _ in range(turns):
            load.turn(1)
            jitted.append(bare.time(False))
            compiled.append(bare.time(True))
        load.loop.end("measured")
        launch_us, jit_us = (1e6 * float(np.median(x)) for x in (driver.seconds, jitted))
        out[str(batch)] = {
            "leaves": leaves,
            "launch_us": launch_us,
            "launch_us_p10": 1e6 * float(np.percentile(driver.seconds, 10)),
            "launch_us_p90": 1e6 * float(np.percentile(driver.seconds, 90)),
            "bare_jit_us": jit_us,
            "bare_compiled_us": 1e6 * float(np.median(compiled)),
            "ratio": launch_us / jit_us,
        }
    return out


def show(console: Console, figures: dict[str, Any], name: str) -> None:
    table = Table(title=f"launching a decode step of {name} on an idle device (us)", title_justify="left")
    for column in ("batch", "weights", "launch", "p10", "p90", "bare jitted call", "bare compiled call", "ratio"):
        table.add_column(column, justify="right")
    for batch, x in figures.items():
        times = [f"{x[k]:.0f}" for k in ("launch_us", "launch_us_p10", "launch_us_p90")]
        bare = [f"{x[k]:.0f}" for k in ("bare_jit_us", "bare_compiled_us")]
        table.add_row(batch, str(x["leaves"]), *times, *bare, f"{x['ratio']:.2f}")
    console.print(table)
