"""The shapes that the engine launches; every jitted program has one of them.

Decode launches are padded to a power of two of rows, or to `max_running_requests`, the largest. Extend launches (mixed
ones too) are padded to a number of tokens: the largest that the scheduler may launch, and that divided by 4, 16, ...
(rounded up) down to about 8. No bucket is above the largest launch, so no launched shape is above the budget. An extend
bucket has the rows of the smallest decode bucket that holds one row a token. With `deterministic` there is one bucket
for all launches, decode ones too, so that every token is computed in the same shape. Imports no jax.

The programs (programs.py), all compiled by the warm-up:

    write_pages                                        one
    decode_<rows>, extend_<tokens>                     one a bucket: a whole step
    forward_decode_<rows>, forward_extend_<tokens>     one a bucket: a step cut in two, for late or masked sampling and
    sample_<rows>                                      details of log-probabilities; one a decode bucket
    output_logprobs_<rows>                             with max_logprobs: one a decode bucket
    input_logprobs_<tokens>                            with max_logprobs: one an extend bucket
    verify_<rows>                                      with a speculator, in place of decode_<rows>
    draft_<rows>, score_<rows>                         a verify step cut in two, for masks that follow from its drafts
"""

from __future__ import annotations

import dataclasses
import logging
from bisect import bisect_left
from dataclasses import dataclass

from jaxoverlap.config import EngineConfig

logger = logging.getLogger(__name__)
_SMALLEST_EXTEND = 8
_EXTEND_RATIO = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """A launched shape: `rows` batch rows, `tokens` (decode: one a row), `writes` page-table entries taken along."""

    tokens: int
    rows: int
    writes: int
    is_decode: bool

    @property
    def name(self) -> str:
        return f"decode_{self.rows}" if self.is_decode else f"extend_{self.tokens}"


@dataclass(frozen=True)
class Buckets:
    """All shapes of an engine, smallest first. Without decode buckets decode launches take extend ones."""

    decode: tuple[Bucket, ...]
    extend: tuple[Bucket, ...]

    @classmethod
    def of(cls, config: EngineConfig, *, context_length: int, max_total_tokens: int) -> Buckets:
        rows = decode_rows(config.max_running_requests)
        pages = max(1, -(-config.speculative_num_draft_tokens // config.page_size))  # that a row may take in a step
        decode = tuple(Bucket(b, b, b * pages, True) for b in rows)
        largest = largest_extend(config, context_length=context_length, max_total_tokens=max_total_tokens)
        if config.deterministic:
            tokens = max(largest, rows[-1])
            return cls((), (Bucket(tokens, rows[-1], -(-tokens // config.page_size) + rows[-1], False),))
        if config.dp_size > 1:  # rows that decode run with what another rank extends
            largest = max(largest, rows[-1])
        extend = []
        for tokens in extend_tokens(largest):
            height = rows[min(bisect_left(rows, tokens), len(rows) - 1)]
            extend.append(Bucket(tokens, height, -(-tokens // config.page_size) + height, False))
        return cls(decode, tuple(extend))

    def for_decode(self, rows: int) -> Bucket:
        """Raises ValueError above the largest."""
        for bucket in self.decode or self.extend:
            if rows <= bucket.rows:
                return bucket
        raise ValueError(f"a decode launch of {rows} rows is above max_running_requests {bucket.rows}")

    def for_extend(self, tokens: int, rows: int) -> Bucket:
        """Raises ValueError above the largest."""
        for bucket in self.extend:
            if tokens <= bucket.tokens:
                if rows > bucket.rows:
                    raise ValueError(f"a prefill launch of {rows} rows is above max_running_requests {bucket.rows}")
                return bucket
        raise ValueError(f"a prefill launch of {tokens} tokens is above the largest, {self.extend[-1].tokens}")


def decode_rows(max_running_requests: int) -> tuple[int, ...]:
    powers = [1 << i for i in range(max_running_requests.bit_length()) if 1 << i < max_running_requests]
    return (*powers, max_running_requests)


def extend_tokens(largest: int) -> tuple[int, ...]:
    sizes = [largest]
    while sizes[-1] > _SMALLEST_EXTEND * 2:
        sizes.append(-(-sizes[-1] // _EXTEND_RATIO))
    return tuple(reversed(sizes))


def fit_chunk(config: EngineConfig) -> EngineConfig:
    """`config` with chunks no longer than `max_prefill_tokens`, and a warning where that shortens them: otherwise the
    first prompt of a batch would launch a shape above the budget. Raises ValueError for a budget below a page."""
    budget = config.max_prefill_tokens // config.page_size * config.page_size
    if config.chunked_prefill_size <= budget:
        return config
    if budget == 0:
        raise ValueError(f"max_prefill_tokens {config.max_prefill_tokens} is below page_size {config.page_size}")
    logger.warning(
        "chunked_prefill_size %d is above max_prefill_tokens %d: chunks of %d tokens are used",
        *(config.chunked_prefill_size, config.max_prefill_tokens, budget),
    )
    return dataclasses.replace(config, chunked_prefill_size=budget)


def largest_extend(config: EngineConfig, *, context_length: int, max_total_tokens: int) -> int:
    """Most tokens in one extend or mixed launch. Chunked prefill bounds it; without, a batch stops growing at
    `max_prefill_tokens` but its first prompt may be as long as the context."""
    if config.chunked_prefill_size > 0:
        limit = config.chunked_prefill_size
    else:
        limit = max(config.max_prefill_tokens, context_length)
    return min(limit, config.max_running_requests * context_length, max_total_tokens)
