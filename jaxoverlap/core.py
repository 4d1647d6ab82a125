"""The vocabulary of the engine; read this first. Imports no jax.

A *request* enters, gets a *slot* (a row of the slot table) and *pages* of KV cache. A *turn* of the loop composes a
*batch*, snapshots it as a *launch*, and handles the *result* of an earlier launch. Names are SGLang's where it has one.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxoverlap.logprobs import LogprobDetails, LogprobTable
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.memory.radix import Node
    from jaxoverlap.memory.slots import SlotTable
    from jaxoverlap.scheduler.stop_text import StopText


class ForwardMode(enum.Enum):
    """What a batch asks of the device. MIXED is EXTEND with decode rows behind it; IDLE has no rows (DP)."""

    EXTEND = "EXTEND"
    DECODE = "DECODE"
    MIXED = "MIXED"
    IDLE = "IDLE"

    @property
    def is_extend(self) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    @property
    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended: `type` is "length", "stop" or "abort"; `matched` the stop token id, string or regex."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """SGLang's `meta_info["finish_reason"]`: the fields that are set."""
        out = {k: getattr(self, k) for k in ("type", "matched", "length", "message", "status_code", "err_type")}
        return {k: v for k, v in out.items() if v is not None}


class RequestError(ValueError):
    """A request that cannot be served; the message names the field and its limit."""


class Grammar(Protocol):
    """The state of one request's constraint, advanced once per committed token."""

    def accept_token(self, token: int) -> None:
        """Raises ValueError when the grammar does not allow the token."""

    def is_terminated(self) -> bool: ...

    def fill_mask(self, words: np.ndarray, ahead: int) -> None:
        """Writes the allowed ids as packed bits into int32 [ahead, ceil(vocab / 32)]: row j for the token j ahead."""

    def after(self, token: int) -> Grammar:
        """A copy that has taken `token`, the only one that the mask allowed."""


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way to its outputs.

    While it holds a slot its numbers (lengths, limits, pages, token ids) are columns of the slot table; what is here
    is what Python must touch one by one, and what outlives the slot.
    """

    rid: str
    prompt_ids: np.ndarray  # int32 [prompt_len]
    params: SamplingParams
    text: str | None = None
    stream: bool = False
    return_logprob: bool = False
    details: LogprobDetails | None = None  # only with return_logprob
    priority: int | None = None
    data_parallel_rank: int | None = None  # the one that serves it
    seed: int = 0  # uint32; drawn by the engine where params.sampling_seed is None
    max_new_tokens: int = 0  # params.max_new_tokens clamped at admission
    stop_ids: tuple[int, ...] = ()  # EOS and stop_token_ids; empty with ignore_eos

    grammar: Grammar | None = None
    forced_token: int = -1  # the only one that the grammar allowed the launch in flight, where it is known
    arrival: int = -1  # order of entering the waiting queue
    finish_reason: FinishReason | None = None
    to_finish: FinishReason | None = None  # an abort, realised at the next commit
    finished_len: int | None = None  # completion tokens at the end, as SGLang counts them
    stop_len: int | None = None  # completion tokens up to the first stop, where a run went past it
    finished_output: bool = False  # the final message has been sent
    is_retracted: bool = False
    stop_text: StopText | None = None  # how far stop_regex has been searched for
    middle_chunks: int = 0  # launched chunks of an unfinished prompt whose results are not handled yet

    slot: int = 0  # 0: holds none
    table: SlotTable | None = None
    kept_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # outputs while without a slot
    kept_logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    last_node: Node | None = None  # deepest tree node that this request holds a lock on
    protected_len: int = 0  # tokens that the tree owns under that lock
    prefix_pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    prefix_len: int = 0  # tokens in cache before the chunk being scheduled
    extend_len: int = 0  # tokens of the chunk being scheduled
    cached_tokens: int = 0  # prompt tokens that came from the tree
    cached_counted: bool = False
    accepted_drafts: np.ndarray | None = None  # int64 [drafts + 1]: verify steps by how many of their drafts counted

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def output_len(self) -> int:
        return int(self.table.output_len[self.slot]) if self.table is not None else len(self.kept_ids)

    @property
    def output_ids(self) -> np.ndarray:
        """int32 [output_len]; with speculation it can run past `finished_len`. A view: copy what must last."""
        return self.table.outputs(self.slot) if self.table is not None else self.kept_ids

    @property
    def output_logprobs(self) -> np.ndarray:
        """float32 [output_len], log-probability of each output token under the model's distribution."""
        return self.table.output_logprobs(self.slot) if self.table is not None else self.kept_logprobs

    def context_ids(self) -> np.ndarray:
        """int32, prompt and the outputs so far: what a request without a slot has to prefill."""
        return np.concatenate([self.prompt_ids, self.kept_ids]) if len(self.kept_ids) else self.prompt_ids

    def max_prefix_len(self, tokens: int) -> int:
        """How many of the `tokens` of its context may come from the tree (SGLang's _compute_max_prefix_len): the last
        one's logits are always wanted, with `return_logprob` all from logprob_start_len on."""
        start = self.prompt_len if self.details is None else self.details.start
        limited = self.return_logprob and start >= 0
        return min(tokens - 1, start) if limited else tokens - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def shown_len(self) -> int:
        """Completion tokens that the caller may see: never one behind a stop."""
        length = self.output_len if self.finished_len is None else self.finished_len
        return length if self.stop_len is None else min(length, self.stop_len)


@dataclass(eq=False, slots=True)
class Batch:
    """The scheduler's own, mutable batch. The decode batch is one object over many turns, as in SGLang: what a later
    turn may still read (the queue of results) is a `Launch`. Its fields are replaced, the lists and arrays in them
    never written to, so that a snapshot needs no copies."""

    mode: ForwardMode
    requests: list[Request]
    slots: np.ndarray  # intp [B]
    epochs: np.ndarray  # int64 [B], as in Launch
    seq_lens: np.ndarray  # intp [B], tokens in cache after this step, as the host knows them
    extend_lens: np.ndarray | None = None  # intp [B]
    prefix_lens: np.ndarray | None = None  # intp [B]
    input_ids: np.ndarray | None = None  # int32 [sum of extend_lens over the prefill rows]
    num_decoding: int = 0  # rows at the end of a MIXED batch that decode
    chunked: Request | None = None
    has_grammar: bool = False
    return_logprob: bool = False
    output_details: bool = False  # some row wants details of its output tokens
    is_prefill_only: bool = False
    is_full: bool = False  # SGLang's batch_is_full: no admission until this batch shrinks
    is_extend_in_batch: bool = False  # over all DP ranks
    is_grammar_in_batch: bool = False  # over all DP ranks
    global_num_tokens: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def __bool__(self) -> bool:
        raise TypeError("compare a batch with None, or its length with 0: SGLang's empty batches are truthy")


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """The frozen snapshot of a batch: what a runner gets and what the result queue holds. Arrays are never rewritten.

    Row order is the batch's. Prefill rows read their ids from `input_ids`; decode rows (all rows of DECODE, the last
    `num_decoding` of MIXED) read theirs from the FutureMap. `page_writes` holds every page-table entry that changed
    since the launch before, whoever's row it is.
    """

    number: int  # SGLang's forward_ct, from 1
    mode: ForwardMode
    requests: list[Request]
    slots: np.ndarray  # intp [B]
    epochs: np.ndarray  # int64 [B]; a row is stale once its slot's epoch has moved on
    seq_lens: np.ndarray  # intp [B]; with speculation a decode row's length before the step, one result late
    extend_lens: np.ndarray | None  # intp [B]
    prefix_lens: np.ndarray | None  # intp [B]
    input_ids: np.ndarray | None  # int32 [sum of extend_lens over the prefill rows]
    num_decoding: int
    page_writes: np.ndarray  # int32 [3, N]: slot, index into the row, page
    delay_sample: bool = False
    mask: np.ndarray | None = None  # int32 [B, ahead, ceil(vocab / 32)], grammar bits known at launch
    chunked: Request | None = None
    return_logprob: bool = False
    output_details: bool = False  # some row wants details of its output token
    input_spans: np.ndarray | None = None  # int32 [B, 2], see scheduler/logprobs.py
    is_prefill_only: bool = False
    is_extend_in_batch: bool = False
    is_grammar_in_batch: bool = False
    global_num_tokens: tuple[int, ...] | None = None

    @property
    def num_prefill(self) -> int:
        """Rows that bring ids from the host; the others decode."""
        return len(self.requests) - self.num_decoding if self.mode.is_extend else 0


@dataclass(frozen=True, eq=False, slots=True)
class StepResult:
    """What comes back from the device for one launch, rows as in the launch."""

    tokens: np.ndarray  # int32 [B], or [B, stride] with speculation
    accept_lens: np.ndarray | None = None  # int32 [B], tokens of each row that count
    seq_lens_in: np.ndarray | None = None  # int32 [B], each row's length before a verify step
    bonus_in: np.ndarray | None = None  # int32 [B], the token that each row's verify step started from
    logprobs: np.ndarray | None = None  # float32, shape of `tokens`
    output_details: LogprobTable | None = None  # of the rows, where some row wants them
    input_details: LogprobTable | None = None  # of the places that the launch's `input_spans` name, row after row


class Output(NamedTuple):
    """What the scheduler tells the caller of a request: its first `completion_tokens` tokens stand. `last` is the last
    of them where the scheduler had it at hand."""

    request: Request
    completion_tokens: int
    finished: bool
    last: int | None = None


class Fact(enum.IntEnum):
    """Columns of what data-parallel ranks tell each other before a launch: SGLang's seven in its order, then ours."""

    NUM_TOKENS = 0
    NUM_TOKENS_FOR_LOGPROB = 1
    CAN_CUDA_GRAPH = 2
    IS_EXTEND = 3
    CAN_RUN_TBO = 4
    FORWARD_MODE = 5  # place in ForwardMode
    CAN_RUN_BREAKABLE_CUDA_GRAPH = 6
    HAS_GRAMMAR = 7
    HAS_WORK = 8  # something is unfinished on the rank


# A turn of the loop yields one of these and is answered by a driver; see scheduler/loops.py.


@dataclass(frozen=True, eq=False, slots=True)
class Sync:
    """Facts for the other ranks; the answer is int64 [ranks, len(Fact)], these rows included."""

    facts: np.ndarray  # int64 [local ranks, len(Fact)]


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """Mask and sample (or score) a launch whose sampling was delayed; no answer."""

    launch: Launch
    handle: Any
    mask: np.ndarray  # int32 [B, ahead, ceil(vocab / 32)]


@dataclass(frozen=True, eq=False, slots=True)
class Wait:
    """The answer is the StepResult of the launch; the only place where the host blocks on the device."""

    launch: Launch
    handle: Any


@dataclass(frozen=True, eq=False, slots=True)
class Drafts:
    """The answer is int32 [B, drafts]: those of a verify step whose masks depend on them; it is scored by `Sample`."""

    launch: Launch
    handle: Any


@dataclass(frozen=True, eq=False, slots=True)
class Launches:
    """What the turns of several ranks ask together (parallel/group.py): one launch of each local rank, for the same
    step; the answer is a list of their handles."""

    launches: list[Launch]


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """The delayed samplings of one step, of those local ranks that delay theirs; no answer."""

    samples: list[Sample]


Turn = Generator["Sync | Launch | Launches | Drafts | Sample | Samples | Wait", Any, None]


class Runner(Protocol):
    """A device behind the drivers. `launch` takes one launch per local rank and returns one opaque handle for each,
    at once; `wait` blocks until that step is done. One that can give details says how many in `max_logprobs`, one that
    does not enforce every SamplingParams refuses the others in `check_params` (ValueError)."""

    def launch(self, launches: list[Launch]) -> list[Any]: ...

    def sample(self, samples: list[Sample]) -> None: ...

    def wait(self, handle: Any) -> StepResult: ...

    def is_ready(self, handle: Any) -> bool: ...
