"""A model under real arrivals, and its decode step against a hand-written one on the same weights."""

from __future__ import annotations

import csv
import dataclasses
import importlib.resources
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.bench import transformers_row
from jaxoverlap.bench.fused import FusedDecode
from jaxoverlap.config import EngineConfig
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.loading import ServedModel
from jaxoverlap.models.decoder import Decoder
from jaxoverlap.progress import Report
from jaxoverlap.trace.summary import percentiles, step_times

STEP_PROMPT = 32  # tokens before the measured decode steps
ROUNDS = 16  # of engine and hand-written step in turn
OTHER_ROUNDS = 3  # those in which transformers' steps take their turn too


@dataclass(frozen=True, slots=True)
class Arrival:
    """`seconds` from the first one; lengths in tokens."""

    seconds: float
    prompt: int
    output: int


def arrivals(count: int, scale: float, longest: int) -> list[Arrival]:
    """The first `count` of the recorded ones (data/NOTICE), at most 512, lengths multiplied by `scale`: at least
    1 and 2 tokens, and cut so that prompt and output fit into `longest`."""
    with importlib.resources.files("jaxoverlap.bench").joinpath("data/azure_conv_2023_512.csv").open() as file:
        rows = list(csv.DictReader(file))[:count]
    out = []
    for row in rows:
        output = min(max(2, round(int(row["output_tokens"]) * scale)), longest // 2)
        prompt = min(max(1, round(int(row["prompt_tokens"]) * scale)), longest - output)
        out.append(Arrival(float(row["seconds"]), prompt, output))
    return out


def spread(load: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same arrivals with their times stretched to `rate` requests a second on average."""
    stretch = (len(load) - 1) / rate / load[-1].seconds if len(load) > 1 else 1.0
    return [dataclasses.replace(a, seconds=a.seconds * stretch) for a in load]


def serve(engine: Engine, load: Sequence[Arrival]) -> dict[str, Any]:
    """Runs the load, each request in its caller's own thread. "ttft_ms" counts from the arrival; "tpot_ms" is a
    request's time from its first token to its last, over the tokens between."""
    vocabulary = engine.model.config.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocabulary, a.prompt).tolist() for a in load]
    times: list[list[float]] = [[] for _ in load]
    tokens = [0] * len(load)
    failures: list[BaseException] = []
    begin = time.perf_counter() + 0.1

    def call(i: int) -> None:
        params = {"max_new_tokens": load[i].output, "temperature": 0.0, "ignore_eos": True}
        try:
            time.sleep(max(0.0, begin + load[i].seconds - time.perf_counter()))
            for result in engine.generate(input_ids=prompts[i], sampling_params=params, stream=True):
                times[i].append(time.perf_counter())
                tokens[i] = len(result["output_ids"])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(load))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    wall = max(t[-1] for t in times) - begin
    return {
        "requests": len(load),
        "rate_per_s": len(load) / max(load[-1].seconds, 1e-9),
        "prompt_tokens": sum(a.prompt for a in load),
        "output_tokens": sum(tokens),
        "tokens_per_s": sum(tokens) / wall,
        "ttft_ms": percentiles([t[0] - begin - a.seconds for t, a in zip(times, load)]),
        "tpot_ms": percentiles([(t[-1] - t[0]) / (n - 1) for t, n in zip(times, tokens) if n > 1]),
    }


def engine_steps(engine: Engine, prompts: np.ndarray, steps: int) -> tuple[list[float], np.ndarray]:
    """Seconds of the decode steps of `prompts` int [B, P] together, as the caller sees its last row's results come,
    and the tokens, int [B, steps]."""
    engine.flush_cache()
    params = {"max_new_tokens": steps, "temperature": 0.0, "ignore_eos": True, "stream_interval": 1}
    tokens = np.zeros((len(prompts), steps), np.int64)
    seen = []
    for result in engine.generate(input_ids=prompts.tolist(), sampling_params=params, stream=True):
        tokens[result["index"], : len(result["output_ids"])] = result["output_ids"]
        if result["index"] == len(prompts) - 1:
            seen.append(time.perf_counter())
    return np.diff(seen).tolist(), tokens


def traced_steps(engine: Engine, prompts: np.ndarray, steps: int) -> tuple[list[float], list[float], np.ndarray]:
    """As the trace tells them, and what `engine_steps` gives, of the same steps."""
    with engine.trace() as trace:
        seen, tokens = engine_steps(engine, prompts, steps)
    full = {s.launch for s in trace.host if s.kind == "wait" and s.rows == len(prompts)}
    trace.host = [s for s in trace.host if s.launch in full]
    return step_times(trace), seen, tokens


def decode_steps(engine: Engine, model: Decoder, other: Any, batch: int, steps: int, report: Report) -> dict[str, Any]:
    """Decode steps of `batch` rows: the engine's, the hand-written one's, and those of `other`, a model of transformers
    or None. They take turns; "ratios" are those of the medians of each round's engine and hand-written steps, "traced"
    those of its engine steps with a trace and without one."""
    rng = np.random.default_rng(0)
    fused = FusedDecode(model, batch, STEP_PROMPT + steps)
    first = jnp.asarray(rng.integers(3, model.config.vocab_size, batch), jnp.int32)
    fused.time(first, STEP_PROMPT, 3)  # compiles
    if other is not None:
        report(f"torch.compile, batch {batch}", 0, 0)
        static = transformers_row.StaticDecode(other, batch, STEP_PROMPT + steps)
        static.warm_up()
        report(f"torch.compile, batch {batch}", 1, 1)
    times: dict[str, list[float]] = {name: [] for name in ("step", "hand_written", *transformers_row.VARIANTS)}
    same = steps
    ratios: list[float] = []
    traced: list[float] = []
    # The first run is slower, and compiles where nothing is warmed up.
    engine_steps(engine, rng.integers(3, model.config.vocab_size, (batch, STEP_PROMPT)), steps)
    for i in range(ROUNDS):
        report(f"decode steps, batch {batch}", i, ROUNDS)
        prompts = rng.integers(3, model.config.vocab_size, (batch, STEP_PROMPT))
        plain = engine_steps(engine, prompts, steps)[0] if i % 2 else []  # in turn first and second
        seconds, seen, tokens = traced_steps(engine, prompts, steps)
        plain = plain or engine_steps(engine, prompts, steps)[0]
        by_hand = fused.time(first, STEP_PROMPT, steps)
        times["step"] += seconds
        times["hand_written"] += by_hand
        if seconds:
            ratios.append(float(np.median(seconds) / np.median(by_hand)))
            traced.append(float(np.median(seen) / np.median(plain)))
        for variant in transformers_row.VARIANTS if other is not None and i < OTHER_ROUNDS else ():
            seconds, theirs = static.time(prompts, steps, variant)
            times[variant] += seconds
            same = min(same, transformers_row.same_tokens(tokens, theirs))
    report(f"decode steps, batch {batch}", ROUNDS, ROUNDS)
    figures: dict[str, Any] = {f"{n}_ms": percentiles(times[n]) for n in ("step", "hand_written")}
    figures["ratios"], figures["traced"] = ratios, traced
    if other is not None:
        row = {f"{n}_ms": percentiles(times[n]) for n in transformers_row.VARIANTS}
        figures["transformers"] = {**row, "tokens": steps, "same_tokens": same}
    return figures


def measure(
    config: EngineConfig,
    model: ServedModel,
    runner: JaxRunner,
    batches: Sequence[int],
    *,
    requests: int,
    scale: float,
    load: float,
    steps: int,
    report: Report,
) -> dict[str, Any]:
    """{"transformers": one line about that row, "batches": {batch: figures}}. Requests arrive at `load` times the rate
    at which `batch` slots would just be busy with decode steps. Raises ValueError for a model that is no Decoder: the
    hand-written step is one."""
    module = model.module  # type: ignore[attr-defined]
    if not isinstance(module, Decoder):
        raise ValueError(f"bench offline needs a decoder with weights, not {model.name}")
    assert config.context_length is not None
    assert config.max_total_tokens is not None
    note, other = transformers_row.why_not(), None
    if note is None:
        other = transformers_row.load_model(config.model_path, module.config.dtype)
        note = transformers_row.describe(other)
    out: dict[str, Any] = {}
    for i, batch in enumerate(batches):
        report("measure", i, len(batches))
        own = dataclasses.replace(config, max_running_requests=batch)
        engine = Engine.from_parts(own, model, runner, config.max_total_tokens)
        figures = decode_steps(engine, module, other, batch, steps, report)
        step = figures["step_ms"]["p50"]
        if step is None:
            raise ValueError(f"no decode step of all {batch} rows was seen: raise --turns or chunked_prefill_size")
        engine.flush_cache()
        recorded = arrivals(requests, scale, config.context_length - 8)
        capacity = batch / (step / 1e3 * float(np.mean([a.output for a in recorded])))
        out[str(batch)] = {
            **figures,
            "ratio": float(np.median(figures["ratios"])),
            "traced_ratio": float(np.median(figures["traced"])),
            **serve(engine, spread(recorded, load * capacity)),
        }
        engine.shutdown()
    report("measure", len(batches), len(batches))
    return {"transformers": note, "batches": out}


def show(console: Console, figures: dict[str, Any], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("batch", "step p50 / p90", "by hand", "ratio", "requests/s", "tokens/s", "TTFT", "TPOT"):
        table.add_column(name, justify="right")
    for batch, x in figures["batches"].items():
        pairs = [f"{x[k]['p50']:.0f} / {x[k]['p90']:.0f}" for k in ("step_ms", "hand_written_ms", "ttft_ms", "tpot_ms")]
        rates = [f"{x['rate_per_s']:.2f}", f"{x['tokens_per_s']:.1f}"]
        table.add_row(batch, *pairs[:2], f"{x['ratio']:.3f}", *rates, *pairs[2:])
    console.print(table)
    for batch, x in figures["batches"].items():
        (low, high), (least, most) = ((min(x[k]), max(x[k])) for k in ("ratios", "traced"))
        note = f"batch {batch}: rounds {low:.2f}-{high:.2f} times the step by hand; "
        note += f"with a trace {x['traced_ratio']:.3f} times the step without one ({least:.2f}-{most:.2f})"
        console.print(note, soft_wrap=True, highlight=False)
    transformers_row.show(console, figures["batches"], figures["transformers"])
