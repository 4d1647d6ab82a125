"""CUDA graphs of decode forwards, as SGLang has them: one a number of rows, and here one a length of context too, since
the pages are gathered. Sampling is not in the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jaxoverlap.progress import Report, silent

_SHORTEST = 256  # tokens; each length is four times the one before
_RATIO = 4


class DecodeGraphs:
    """`forward(slots, seq_lens, longest)` -> logits float32 [rows, V] is captured for each of `rows` and each length up
    to `longest`, in tokens. Captures and replays run on the current stream; the logits of a replay last until the
    next."""

    def __init__(
        self, forward: Callable[[Tensor, Tensor, int], Tensor], rows: Sequence[int], longest: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._rows = tuple(rows)
        lengths = [longest]
        while lengths[-1] > _SHORTEST:
            lengths.append(max(_SHORTEST, lengths[-1] // _RATIO))
        self._lengths = tuple(reversed(lengths))
        self._inputs = torch.zeros(2, max(rows), dtype=torch.int64, device=device)  # slots, seq_lens; zeros: padding
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    def capture(self, progress: Report | None = None) -> None:
        """Largest first, into one memory pool."""
        report, pool = progress or silent, torch.cuda.graph_pool_handle()
        shapes = list(itertools.product(reversed(self._rows), reversed(self._lengths)))
        for done, (rows, length) in enumerate(shapes):
            report("capture", done, len(shapes))
            slots, seq_lens = self._inputs[:, :rows]
            self._forward(slots, seq_lens, length)  # what is set up on first use must not be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                logits = self._forward(slots, seq_lens, length)
            self._graphs[rows, length] = graph, logits
        report("capture", len(shapes), len(shapes))

    def replay(self, slots: Tensor, seq_lens: Tensor, longest: int) -> Tensor:
        """int64 [B] each -> float32 [B, V]."""
        count = len(slots)
        rows = next(n for n in self._rows if n >= count)
        length = next(n for n in self._lengths if n >= longest)
        self._inputs[:, :count] = torch.stack([slots, seq_lens])
        self._inputs[:, count:rows] = 0
        graph, logits = self._graphs[rows, length]
        graph.replay()
        return logits[:count]
