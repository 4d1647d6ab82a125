"""What composing a batch costs with a long waiting queue and a large prefix tree. Imports no jax."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Request, StepResult, Wait
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler import Scheduler

PROMPT, CONTEXT, VOCAB = 1000, 2048, 32000
POOL = 200_000
RUNNING = 32


@dataclass(frozen=True)
class Load:
    waiting: int
    cached_tokens: int


LOADS = (Load(10, 1_000), Load(10, 100_000), Load(10_000, 1_000), Load(10_000, 100_000))


def measure(policy: str = "fcfs", turns: int = 300) -> list[dict[str, Any]]:
    """A row for each of LOADS: median microseconds from the start of a turn to its launch, when a slot frees and is
    given to the next request (`admit_us`) and in a plain decode turn with every slot taken (`decode_us`), each also as
    a ratio to the first load's."""
    schedulers = [prepare(load, policy) for load in LOADS]
    times: list[dict[str, list[float]]] = [{"admit_us": [], "decode_us": []} for _ in LOADS]
    for i in range(turns):
        for s, row in zip(schedulers, times):  # interleaved: a slow moment of the machine hits all alike
            seconds, launch = turn(s, i)
            if launch is not None:
                row["admit_us" if launch.mode.is_extend else "decode_us"].append(seconds * 1e6)
    rows: list[dict[str, Any]] = []
    for load, row in zip(LOADS, times):
        rows.append({"waiting": load.waiting, "cached_tokens": load.cached_tokens})
        rows[-1] |= {k: statistics.median(v) for k, v in row.items()}
        rows[-1] |= {f"{k}_ratio": rows[-1][f"{k}_us"] / rows[0][f"{k}_us"] for k in ("admit", "decode")}
    return rows


def prepare(load: Load, policy: str) -> Scheduler:
    """A scheduler with a full decode batch, a tree of `cached_tokens` and `waiting` requests."""
    config = EngineConfig(
        model_path="checksum",
        max_running_requests=RUNNING,
        max_total_tokens=POOL,
        schedule_policy=policy,  # type: ignore[arg-type]
        chunked_prefill_size=-1,
        init_new_token_ratio=0.1,
    )
    s = Scheduler(config, max_total_tokens=POOL, context_length=CONTEXT, vocab_size=VOCAB)
    rng = np.random.default_rng(0)
    for i in range(load.cached_tokens // PROMPT):
        s.submit(request(f"cached{i}", rng.integers(0, VOCAB, PROMPT), 1))
    i = 0
    while not s.is_idle:
        turn(s, i)
        i += 1
    for i in range(RUNNING + load.waiting):
        s.submit(request(f"r{i}", rng.integers(0, VOCAB, 16), 8 + 4 * (i % RUNNING)))
    return s


def request(rid: str, ids: np.ndarray, max_new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return Request(rid=rid, prompt_ids=ids.astype(np.int32), params=params)


def turn(s: Scheduler, number: int) -> tuple[float, Launch | None]:
    """One turn on a device that costs nothing: seconds until its launch, and the launch."""
    begin = time.perf_counter()
    seconds, launch, answer = 0.0, None, None
    generator = s.turn()
    try:
        while True:
            asked = generator.send(answer)
            answer = None
            if isinstance(asked, Launch):
                seconds, launch = time.perf_counter() - begin, asked
            elif isinstance(asked, Wait):
                answer = StepResult(np.full(len(asked.launch.requests), number % VOCAB, np.int32))
    except StopIteration:
        s.outputs.clear()
        return seconds, launch


def show(console: Console, rows: list[dict[str, Any]], policy: str) -> None:
    table = Table(title=f"composing a batch, policy {policy}: median from the start of the turn to its launch")
    for name in ("waiting", "cached tokens", "admitting", "ratio", "decode only", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['waiting']:,}",
            f"{row['cached_tokens']:,}",
            f"{row['admit_us']:.0f} us",
            f"{row['admit_ratio']:.2f}",
            f"{row['decode_us']:.0f} us",
            f"{row['decode_ratio']:.2f}",
        )
    console.print(table)
