"""Whether tokens that differ do so by rounding alone: in bfloat16 two runners may order two nearly equal logits
differently, and from there on their texts are not the same."""

from __future__ import annotations

from typing import Any

import torch

from jaxoverlap.compare.measure import Comparison
from jaxoverlap.compare.torch_model import TorchDecoder
from jaxoverlap.compare.torch_paged import PagedContext, Span


def largest_margin(comparison: Comparison, model: TorchDecoder) -> float:
    """Of all requests that differ, the largest difference in `model`'s logits between the two tokens at the place where
    they part; infinite where one output ends there. For greedy requests."""
    margins = [_margin(comparison, model, d) for d in comparison.differences()]
    return max(margins, default=0.0)


@torch.inference_mode()
def _margin(comparison: Comparison, model: TorchDecoder, d: dict[str, Any]) -> float:
    if d["expected"] is None or d["got"] is None:
        return float("inf")
    request = d["request"]
    ids = comparison.prompts[request] + comparison.expected.output_ids[request][: d["position"]]
    device = model.weights["embedding"].device
    places = torch.arange(len(ids), device=device)[None]
    context = PagedContext([Span(places, places)], len(ids))
    hidden = model(torch.tensor(ids, device=device), context, model.cache(len(ids), device))
    logits = model.logits(hidden[-1:])[0]
    return float((logits[d["expected"]] - logits[d["got"]]).abs())
