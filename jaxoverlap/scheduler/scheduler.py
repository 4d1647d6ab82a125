"""The Scheduler: the state that the turns of the loop work on, and the doors through which requests come in."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Batch, Launch, Output, Request, Turn
from jaxoverlap.memory.kv_cache import KVCache
from jaxoverlap.memory.slots import SlotTable
from jaxoverlap.scheduler.audit import audit
from jaxoverlap.scheduler.batches import empty_batch
from jaxoverlap.scheduler.decode import NewTokenRatio
from jaxoverlap.scheduler.grammar_queue import GrammarBackend, GrammarQueue
from jaxoverlap.scheduler.intake import Abort, Flush, Operation, Pause, Resume, Submit
from jaxoverlap.scheduler.loops import event_loop_normal, event_loop_overlap
from jaxoverlap.scheduler.policy import make_policy
from jaxoverlap.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Totals since the start. `last_result` is time.monotonic() of the newest handled result (liveness)."""

    turns: int = 0
    launches: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    retracted: int = 0
    verified_rows: int = 0  # of verify steps, those handled
    accepted_drafts: int = 0
    dropped_rows: int = 0  # of requests that had ended, been retracted or aborted meanwhile
    overlap_disabled: int = 0
    sampling_delayed: int = 0  # launches with a grammar row, sampled when the result before was handled
    sampling_not_delayed: int = 0  # those whose masks did not depend on it (delay_sampling when-needed)
    last_result: float = 0.0


class Observer(Protocol):
    """Hears what a turn does, as it happens, and why; for traces and replays."""

    def note(self, event: str, number: int | None) -> None: ...

    def row(self, event: str, request: Request, tokens: list[int]) -> None: ...

    def reason(self, text: str) -> None: ...


class Watch(Protocol):
    """Keeps time of a turn's parts; see trace/recorder.py."""

    def mark(self, part: str) -> None:
        """What went on since the last mark, or the last answer of the driver, was `part`."""

    def cause(self, cause: str) -> None:
        """Why this turn leaves the device idle."""


class Scheduler:
    """One rank's scheduler. `submit`, `abort`, `pause`, `resume` and `flush_cache` may be called from any thread; they
    take effect at the start of the next turn. Everything else belongs to the thread that turns the loop.

    `decode` turns token ids into text, special tokens too (stop strings and regular expressions need it); `byte_ids`
    are those of growing_text.byte_tokens; `grammar_backend` compiles grammars (without one, a request with a grammar
    must not be submitted).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_total_tokens: int,
        context_length: int,
        vocab_size: int,
        decode: Callable[[Sequence[int] | np.ndarray], str] | None = None,
        byte_ids: Collection[int] = (),
        grammar_backend: GrammarBackend | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.context_length = context_length
        self.max_total_tokens = max_total_tokens // config.page_size * config.page_size
        self.vocab_size = vocab_size
        if self.max_prompt_len < 1:
            raise ValueError(
                f"max_total_tokens {max_total_tokens} and context_length {context_length} hold no request "
                f"with page_size {config.page_size}"
            )
        self.decode = decode
        self.byte_ids = byte_ids
        self.observer = observer
        self.watch: Watch | None = None
        self.is_speculative = config.speculative_num_draft_tokens > 0

        slack = 2 * config.verify_reserve
        self.slots = SlotTable(config.max_running_requests, context_length, config.page_size, slack=slack)
        self.kv = KVCache(
            self.slots,
            self.max_total_tokens,
            prefix_cache=not config.disable_radix_cache,
            bigram=config.speculative_algorithm in ("EAGLE", "EAGLE3"),
        )
        self.new_token_ratio = NewTokenRatio(config)
        self.policy = make_policy(config, self.kv)
        self.grammars = GrammarQueue(grammar_backend, config.grammar_timeout)

        self.inbox: deque[Operation] = deque()
        self.outputs: deque[Output] = deque()
        self.waiting = WaitingQueue()
        self.running_batch: Batch = empty_batch()
        self.last_batch: Batch | None = None
        self.cur_batch: Batch | None = None
        self.last_launch: Launch | None = None
        self.chunked: Request | None = None
        self.chunked_to_abort = False
        self.result_queue: deque[tuple[Launch, Any]] = deque()
        self.is_paused = False
        self.arrivals = 0
        self.counters = Counters()

    def submit(self, request: Request) -> None:
        """`request` is valid: known ids, a prompt within `max_prompt_len`, a unique rid."""
        self.inbox.append(Submit(request))

    def abort(self, rid: str = "", *, abort_all: bool = False, exact: bool = False) -> None:
        """Ends every request whose id starts with `rid` (SGLang's rule), or is `rid` (`exact`), wherever it is. Unknown
        ids are no error."""
        self.inbox.append(Abort(rid, abort_all, exact))

    def pause(self, mode: str, *, flush: bool = False) -> None:
        """`mode` is SGLang's: "in_place", "retract" or "abort" (which flushes the loop; the caller aborts). `flush`,
        with "retract": the prefix tree, which nobody uses then, is emptied, whoever waits."""
        if mode not in ("in_place", "retract", "abort"):
            raise ValueError(f"pause mode must be in_place, retract or abort, not {mode!r}")
        if flush and mode != "retract":
            raise ValueError(f"flush goes with pause mode retract, not {mode}")
        self.inbox.append(Pause(mode, flush))

    def resume(self) -> None:
        self.inbox.append(Resume())

    def flush_cache(self) -> None:
        """Empties the prefix tree at the next turn in which the scheduler is idle."""
        self.inbox.append(Flush())

    @property
    def max_prompt_len(self) -> int:
        """Longest prompt that is admitted: SGLang's limit (under min(context, pool) - 1 - 5), and no more than what
        leaves a token to generate: with pages, SGLang admits longer ones, which then wait for ever or give nothing."""
        page, total = self.config.page_size, self.max_total_tokens - self.verify_room
        return min(self.context_length - 7, total - 7, (total - 2) // page * page - page)

    @property
    def verify_room(self) -> int:
        """Tokens of the pool that no request alone may fill, so that its verify steps fit. SGLang, whose traces are
        EAGLE's, keeps none and aborts the request."""
        if self.config.speculative_algorithm in ("none", "EAGLE"):
            return 0
        page = self.config.page_size
        return (-(-self.config.verify_reserve // page) + 1) * page

    @property
    def ranks(self) -> range:
        return range(1)

    @property
    def is_joint(self) -> bool:
        """Whether turns meet those of other processes."""
        return False

    @property
    def anyone_works(self) -> bool:
        return self.has_work

    def choose(self, request: Request) -> int:
        """The rank that will serve it; a Group has more than one."""
        return 0

    def assign(self, request: Request) -> None:
        """As Group's."""

    @property
    def launches(self) -> int:
        return self.counters.launches

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_pending(self) -> bool:
        """A turn may go by without a launch: for a result, an operation, the end of a pause or a grammar."""
        return bool(self.result_queue or self.inbox or self.is_paused or self.grammars.pending)

    @property
    def is_idle(self) -> bool:
        """Nothing to do: no operation, request or result is pending."""
        return not self.inbox and not self.has_work

    @property
    def has_work(self) -> bool:
        return bool(self.grammars.pending) or self._has_rows

    @property
    def only_compiles(self) -> bool:
        """Nothing to do until a grammar is compiled, or something comes in."""
        return bool(self.grammars.pending) and not (self.inbox or self._has_rows)

    @property
    def _has_rows(self) -> bool:
        return bool(
            self.waiting
            or self.chunked is not None
            or self.result_queue
            or len(self.running_batch)
            or self.last_batch is not None
        )

    def metrics(self) -> dict[str, Any]:
        """See Engine.metrics."""
        counters = dataclasses.asdict(self.counters)
        counters["last_result"] = counters["last_result"] or None
        return {
            **counters,
            "waiting": len(self.waiting),
            "running": self.slots.num_slots - self.slots.num_free,
            "in_flight": len(self.result_queue),
            "free_slots": self.slots.num_free,
            "free_tokens": self.kv.pages.available_tokens,
            "evictable_tokens": self.kv.tree.evictable_tokens,
            "max_total_tokens": self.max_total_tokens,
        }

    def turn(self) -> Turn:
        """One turn of the configured loop; see scheduler/loops.py."""
        self.counters.turns += 1
        yield from event_loop_normal(self) if self.config.disable_overlap_schedule else event_loop_overlap(self)
        if self.config.audit:
            audit(self)

    def enqueue(self, request: Request) -> None:
        """To the end of the waiting queue."""
        request.arrival = self.arrivals
        self.arrivals += 1
        self.waiting.append(request)

    def note(self, event: str, number: int | None = None) -> None:
        if self.observer is not None:
            self.observer.note(event, number)

    def row(self, event: str, request: Request, tokens: Sequence[int] = ()) -> None:
        if self.observer is not None:
            self.observer.row(event, request, list(tokens))

    def reason(self, text: str, *values: Any) -> None:
        """Why the turn goes as it does; `text % values` is made only where somebody listens."""
        if self.observer is not None:
            self.observer.reason(text % values)
