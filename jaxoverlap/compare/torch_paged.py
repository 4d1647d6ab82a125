"""What a PyTorch model sees of the batch it computes; the counterpart of models/paged.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Cache = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that are attended to together: R rows with N tokens each, one row behind the other."""

    positions: Tensor  # int64 [R, N]
    locs: Tensor  # int64 [R, L], where positions 0..L-1 of each row lie in the cache; L covers the longest row

    @property
    def tokens(self) -> int:
        return self.positions.numel()

    def seen(self) -> Tensor:
        """bool [R, N, L]: the positions that a token attends to. A padding row (position -1) sees one, so that its
        softmax is defined."""
        places = torch.arange(self.locs.shape[1], device=self.locs.device)
        return places <= self.positions.clamp(min=0)[:, :, None]

    def token_locs(self) -> Tensor:
        """int64 [R, N]: where the tokens' own KV goes."""
        return self.locs.gather(1, self.positions.clamp(min=0))


class PagedContext:
    """A batch of T tokens as spans. The cache is flat, layer l at l * num_locs, as in models/paged.py; page 0 is never
    given out, and padding rows, whose page table is that of slot 0, write there."""

    def __init__(self, spans: Sequence[Span], num_locs: int) -> None:
        self.spans = spans
        self.num_locs = num_locs
        self.positions = torch.cat([s.positions.flatten() for s in spans])  # int64 [T]
        self.token_locs = torch.cat([s.token_locs().flatten() for s in spans])  # int64 [T]
        self._seen = [s.seen() for s in spans]

    def write(self, cache: Cache, layer: int, k: Tensor, v: Tensor) -> None:
        """This step's k and v [T, H, D], in place."""
        locs = self.token_locs + layer * self.num_locs
        cache[0][locs], cache[1][locs] = k, v

    def attend(self, q: Tensor, cache: Cache, layer: int, scale: float) -> Tensor:
        """Causal attention of q [T, Hq, D] over the layer's cache, this step's `write` included -> [T, Hq, D]."""
        out, first = [], 0
        for span, seen in zip(self.spans, self._seen):
            rows, n = span.positions.shape
            locs = span.locs + layer * self.num_locs
            part = q[first : first + span.tokens].unflatten(0, (rows, n))
            out.append(_attend(part, cache[0][locs], cache[1][locs], seen, scale).flatten(0, 1))
            first += span.tokens
        return torch.cat(out)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [R, N, Hq, D]; k, v [R, L, H, D]; seen bool [R, N, L] -> [R, N, Hq, D]. The query heads of a KV head are folded
    into the query axis, so that keys and values are not repeated."""
    n, kv_heads = q.shape[1], k.shape[2]
    folded = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, H, G * N, D]
    mask = seen[:, None].repeat(1, 1, folded.shape[2] // n, 1)
    y = scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return y.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def locations(page_table: Tensor, slots: Tensor, page_size: int, length: int) -> Tensor:
    """page_table int64 [slots, pages], slots int64 [R] -> int64 [R, length], where positions 0..length-1 lie."""
    places = torch.arange(length, device=page_table.device)
    return page_table[slots[:, None], places // page_size] * page_size + places % page_size


class TorchModel(Protocol):
    """A model that TorchRunner can serve."""

    config: Any  # at least vocab_size

    def cache(self, num_locs: int, device: torch.device) -> Cache:
        """The flat cache for `num_locs` locations, zeros."""

    def __call__(self, ids: Tensor, context: PagedContext, cache: Cache) -> Tensor:
        """ids int64 [T] -> hidden [T, D]; writes this step into the cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, D] of the rows' last tokens -> float32 [B, vocab_size]."""
