"""The checksum model of models/checksum.py in PyTorch, read through the same pages."""

from __future__ import annotations

import torch
from torch import Tensor

from jaxoverlap.compare.torch_paged import Cache, PagedContext, Span
from jaxoverlap.models.checksum import ChecksumConfig

_START, _FACTOR, _PERIOD = 7, 31, 13  # the rule, see ChecksumConfig
_GAP = 1000.0


class TorchChecksum:
    """`ChecksumConfig`'s rule; the hash is a sum of powers modulo a prime, so that a row takes no loop."""

    def __init__(self, config: ChecksumConfig | None = None) -> None:
        self.config = config or ChecksumConfig()
        powers = [1]
        for _ in range(self.config.max_position_embeddings + 1):
            powers.append(powers[-1] * _FACTOR % self.config.modulus)
        self.powers = torch.tensor(powers)  # int64, FACTOR**k

    def cache(self, num_locs: int, device: torch.device) -> Cache:
        """Token ids, int64 [num_locs]."""
        self.powers = self.powers.to(device)
        return (torch.zeros(num_locs, dtype=torch.int64, device=device),)

    def __call__(self, ids: Tensor, context: PagedContext, cache: Cache) -> Tensor:
        """ids int64 [T] -> int64 [T, 1], the hash of each token's row as it is after this step."""
        cache[0][context.token_locs] = ids
        return torch.cat([self._hash(span, cache[0]) for span in context.spans])[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden int64 [B, 1] -> float32 [B, V]: 0 at the next token, falling by 1000 with each id upwards (cyclic)."""
        following = self.config.offset + hidden % self.config.span
        distance = torch.arange(self.config.vocab_size, device=hidden.device) - following
        return (distance % self.config.vocab_size).float() * -_GAP

    def _hash(self, span: Span, stored: Tensor) -> Tensor:
        """int64 [R * N]: 7 * 31**n + sum over i of (t_i + 1) * (i % 13 + 1) * 31**(n - 1 - i), modulo a prime."""
        lens = span.positions[:, -1:] + 1  # [R, 1]
        places = torch.arange(span.locs.shape[1], device=stored.device)
        terms = (stored[span.locs] + 1) * (places % _PERIOD + 1) * self.powers[(lens - 1 - places).clamp(min=0)]
        total = terms.where(places < lens, 0).sum(1) + _START * self.powers[lens[:, 0]]
        return (total % self.config.modulus).repeat_interleave(span.positions.shape[1])
