"""The rule of kernels/sample.py and the noise of kernels/noise.py in PyTorch, so that sampled tokens agree too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jaxoverlap.sampling_params import GREEDY_TEMPERATURE

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ROUNDS = 5  # of four rotations
_WORD = 0xFFFFFFFF  # uint32 words are held in int64, cut after every sum


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of a batch's rows, each [B] on the device, and what the host knows of them."""

    temperature: Tensor  # float32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    top_k: Tensor  # int32, below 1: off
    seed: Tensor  # int32, the bits of a uint32
    all_greedy: bool
    any_limited: bool  # some row has top_p, top_k or min_p


def sample(
    logits: Tensor, params: RowParams, positions: Tensor, mask: Tensor | None = None, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the unchanged logits: int64 [B], float32 [B]. Arguments are those
    of kernels/sample.py: logits float32 [B, V], positions int [B], mask int32 [B, ceil(V / 32)], forced int [B]."""
    allowed = logits if mask is None else logits.where(unpack_mask(mask, logits.shape[1]), -torch.inf)
    tokens = allowed.argmax(-1)
    if not params.all_greedy:
        greedy = (params.temperature < GREEDY_TEMPERATURE) | (params.top_k == 1)
        tokens = tokens.where(greedy, _draw(allowed, params, positions, greedy))
    if forced is not None:
        tokens = torch.where(forced >= 0, forced.long(), tokens)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def unpack_mask(mask: Tensor, vocab_size: int) -> Tensor:
    """bool [B, V] from packed bits int32 [B, ceil(V / 32)]."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return bits.flatten(1)[:, :vocab_size] == 1


def noise(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise float32 [B, V] of seeds, int32 bits of a uint32 [B], and positions int [B]."""
    key = seed.long() & _WORD
    key_of_step = _threefry((torch.zeros_like(key), key), torch.zeros_like(key), positions.long() & _WORD)
    ids = torch.arange(vocab_size, device=seed.device)[None]
    a, b = _threefry((key_of_step[0][:, None], key_of_step[1][:, None]), torch.zeros_like(ids), ids)
    bits = ((a ^ b) >> 9) | 0x3F800000
    uniform = (bits.int().view(torch.float32) - 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    return -(-uniform.log()).log()


def _threefry(key: tuple[Tensor, Tensor], high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry-2x32, as kernels/noise.py's."""
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    a, b = (high + keys[0]) & _WORD, (low + keys[1]) & _WORD
    for i in range(_ROUNDS):
        for turn in _ROTATIONS[i % 2]:
            a = (a + b) & _WORD
            b = a ^ (((b << turn) | (b >> (32 - turn))) & _WORD)
        a = (a + keys[(i + 1) % 3]) & _WORD
        b = (b + keys[(i + 2) % 3] + i + 1) & _WORD
    return a, b


def _draw(logits: Tensor, params: RowParams, positions: Tensor, greedy: Tensor) -> Tensor:
    scaled = logits / params.temperature.where(~greedy, 1.0)[:, None]
    noised = scaled + noise(params.seed, positions, logits.shape[1])
    if params.any_limited:
        noised = noised.where(_kept(scaled, params), -torch.inf)
    return noised.argmax(-1)


def _kept(scaled: Tensor, params: RowParams) -> Tensor:
    """bool [B, V], by a sort: the lower id first among equals."""
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp()  # probabilities over the largest one
    before = weights.cumsum(-1) - weights
    by_p = (params.top_p >= 1.0)[:, None] | (before <= (params.top_p * weights.sum(-1))[:, None])
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    by_k = (params.top_k < 1)[:, None] | (rank < params.top_k[:, None])
    kept = by_p & by_k & (weights >= params.min_p[:, None])
    return torch.empty_like(kept).scatter_(1, ids, kept)
