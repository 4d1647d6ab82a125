"""transformers' decode step on the same weights, for `bench offline`: static KV cache, eager and with torch.compile."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxoverlap.checkpoint.fetch import fetch

VARIANTS = ("eager", "compiled")


def why_not() -> str | None:
    """One line that says what the row needs and does not find; None where it can be measured."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return f'no transformers row: it needs {" and ".join(missing)}: pip install "jaxoverlap[torch]"'
    if jax.default_backend() != "cpu":
        return f"no transformers row: it is measured on the CPU, and the engine runs on {jax.default_backend()}"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"no transformers row: torch.compile needs the C++ compiler {compiler}"
    return None


def load_model(name: str, dtype: str) -> Any:
    """The transformers model of a Hugging Face directory or demo model, computed in `dtype` on the CPU."""
    import torch
    import transformers

    directory = Path(name) if Path(name).is_dir() else fetch(name)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), local_files_only=True
    )
    return model.eval()


def describe(model: Any) -> str:
    """One line: what runs, in which versions, on how many threads."""
    import torch

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch"))
    dtype = str(model.dtype).removeprefix("torch.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{versions}: {type(model).__name__}, {dtype}, static cache; threads as each library sets them: "
        f"torch {torch.get_num_threads()}, XLA one a core ({cores})"
    )


class StaticDecode:
    """`batch` rows with room for `length` tokens, greedy. Compiled steps of an earlier instance are dropped."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        import torch
        import transformers

        torch.compiler.reset()  # a program for one batch size must not be recompiled for all of them
        self._batch = batch
        self._cache = cache = transformers.StaticCache(config=model.config, max_cache_len=length)

        def step(tokens: Any) -> Any:
            # By position: releases differ in the name of the cache's argument.
            return model(tokens, None, None, cache).logits[:, -1:].argmax(-1)

        self._steps = {"eager": step, "compiled": torch.compile(step, dynamic=False)}

    def time(self, prompts: np.ndarray, steps: int, variant: str) -> tuple[list[float], np.ndarray]:
        """Seconds of each of `steps` - 1 decode steps, and the `steps` tokens of each row, int64 [B, steps]. `prompts`
        is int [B, P]; they run eagerly and give the first token."""
        import torch

        seconds = []
        with torch.no_grad():
            self._cache.reset()
            tokens = self._steps["eager"](torch.from_numpy(prompts.astype(np.int64)))
            out = [tokens.numpy()]
            for _ in range(steps - 1):
                begin = time.perf_counter()
                tokens = self._steps[variant](tokens)
                seconds.append(time.perf_counter() - begin)
                out.append(tokens.numpy())
        return seconds, np.concatenate(out, axis=1)

    def warm_up(self) -> None:
        """Compiles; takes a minute for a model of 30 layers."""
        for variant in VARIANTS:
            self.time(np.zeros((self._batch, 4), np.int64), 3, variant)


def same_tokens(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Of int [B, n] each: how many columns, from the first on, are the same in every row."""
    same = (ours == theirs).all(axis=0)
    return int(np.logical_and.accumulate(same).sum())


def show(console: Console, figures: dict[str, Any], note: str) -> None:
    """The table where `figures` (by batch) hold the row; below it `note`."""
    if all("transformers" in x for x in figures.values()):
        table = Table(title="transformers on the same weights: ms a decode step", title_justify="left")
        for name in ("batch", "eager p50 / p90", "compiled p50 / p90", "engine / compiled", "same tokens"):
            table.add_column(name, justify="right")
        for batch, x in figures.items():
            row = x["transformers"]
            pairs = [f"{row[f'{v}_ms']['p50']:.0f} / {row[f'{v}_ms']['p90']:.0f}" for v in VARIANTS]
            same = f"{row['same_tokens']} of {row['tokens']}"
            table.add_row(batch, *pairs, f"{x['step_ms']['p50'] / row['compiled_ms']['p50']:.3f}", same)
        console.print(table)
    console.print(note, highlight=False, markup=False)
