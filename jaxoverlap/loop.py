"""Loop: who turns the scheduler. There is no thread for it: of the threads that wait for something one drives, and the
others sleep until they have what they wait for or the driver leaves. Imports no jax."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxoverlap.calls import Call, Ticket
from jaxoverlap.driver import Driver
from jaxoverlap.interrupts import HeldInterrupts
from jaxoverlap.parallel.group import Group
from jaxoverlap.scheduler import Scheduler

if TYPE_CHECKING:
    from jaxoverlap.trace.recorder import Recorder

STILL_TURNS = 8  # a bubble takes one
GRAMMAR_POLL = 1e-3  # seconds between turns that only wait for grammars (SGLang: 5e-3)
Done = Callable[[], bool]  # asked by the driver between turns, and by the others under the lock


class EngineError(RuntimeError):
    """The engine cannot go on; the message names the cause, which is also `__cause__`."""


class Loop:
    """Turns a scheduler for many threads and hands its outputs to their tickets.

    After an exception inside a turn nothing is turned any more: whoever waits, or comes later, gets an EngineError.
    With ranks in other processes the runner's `leave` ends the process instead.
    """

    def __init__(self, scheduler: Scheduler | Group, driver: Driver) -> None:
        self.scheduler = scheduler
        self.driver = driver
        self.leave: Callable[[BaseException], None] | None = getattr(driver.runner, "leave", None)
        self.lock = threading.Lock()  # guards what follows
        self.tickets: dict[str, Ticket] = {}  # of unfinished requests
        self.is_paused = False
        self.failure: BaseException | str | None = None
        self.recorder: Recorder | None = None  # of the turns to come, in the driver's place
        self._waiters: dict[threading.Condition, Done] = {}
        self._held: dict[str, list[Ticket]] = {}  # by the id that they wait for
        self._driver_thread: int | None = None  # who turns the loop
        self._in_turn = False
        self._turns = 0
        self._launches = self._still_turns = 0  # as of the last turn; turns since anything moved
        self._poked = False  # something came in that no turn has seen

    def submit(self, call: Call) -> None:
        with self.lock:
            self.check_alive()
            call.pending = len(call.tickets)
            for ticket in (*call.ahead, *call.tickets):
                self.tickets[ticket.request.rid] = ticket
                if ticket.waits_for is None:
                    self.scheduler.submit(ticket.request)
                else:
                    self._held.setdefault(ticket.waits_for, []).append(ticket)
            self._poke()

    def operate(self, operation: Callable[[], None]) -> None:
        """`operation` gives the scheduler something to see in the next turn, which comes even while paused."""
        with self.lock:
            operation()
            self._poke()

    def record(self, recorder: Recorder | None) -> None:
        """From the next turn on; None ends it. Raises RuntimeError while another one records."""
        with self.lock:
            if recorder is not None and self.recorder is not None:
                raise RuntimeError("one trace at a time: another one is being recorded")
            self.recorder = recorder
            if not self._in_turn:
                self.scheduler.watch = recorder

    def drive(self, done: Done) -> None:
        """Turns the loop, or sleeps while another thread does or while paused, until `done`."""
        waiter = threading.Condition(self.lock)
        me = threading.get_ident()
        while True:
            try:
                with self.lock:
                    self._waiters[waiter] = done
                    while not done() and self.failure is None and (self._driver_thread or self._is_asleep):
                        waiter.wait()
                    if done():
                        return
                    self.check_alive()
                    del self._waiters[waiter]
                    self._driver_thread = me
                with HeldInterrupts() as interrupts:
                    while not (done() or self._is_asleep or interrupts.pending):
                        self._turn()
            finally:
                with self.lock:
                    self._waiters.pop(waiter, None)
                    if self._driver_thread == me:
                        self._driver_thread = None
                    self._wake()

    def drive_until_done(self, call: Call) -> None:
        """Until all its requests have ended. With ranks in other processes, until nobody anywhere has work: turns meet
        those of the others, so that none may make one more or one less."""
        if not self.scheduler.is_joint:
            self.drive(lambda: call.pending == 0)
            return
        turns = self._turns
        self.drive(lambda: self._turns > turns and not self.scheduler.anyone_works)

    def drive_until_seen(self) -> None:
        """Until a turn has seen everything that came in."""
        self.drive(lambda: not self._poked and not self._in_turn)

    def drive_until_idle(self) -> None:
        """Until nothing is unfinished or in flight, or the loop is paused."""
        self.drive(lambda: self.is_paused or (not (self._poked or self._in_turn) and self.scheduler.is_idle))

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """Returns when they have ended; while paused, at once."""
        self.operate(lambda: self._submit_aborts(tickets))
        self.drive(lambda: self.is_paused or all(t.finished for t in tickets))

    def abandon(self, call: Call) -> None:
        """The caller has gone: what has not ended is aborted."""
        if self.failure is not None or not call.pending:
            return
        tickets = [*call.ahead, *call.tickets]
        if self.scheduler.is_joint:
            self.operate(lambda: self._submit_aborts(tickets))
            self.drive_until_done(call)
        else:
            self.abort(tickets)

    def collect(self, call: Call) -> None:
        """`abandon` for the garbage collector, which may run anywhere, a turn included: never waits for a lock. Where
        the loop cannot be turned from here, the next turn sees the abort."""
        if self.failure is not None or not call.pending or sys.is_finalizing():
            return
        self._submit_aborts([*call.ahead, *call.tickets])
        self._poked = True
        if self.lock.acquire(blocking=False):
            free = self._driver_thread is None
            self.lock.release()
            if free:
                self.drive(lambda: self.is_paused or call.pending == 0)

    def check_alive(self) -> None:
        """Raises EngineError once a turn has failed or the loop was ended."""
        if isinstance(self.failure, BaseException):
            cause = self.failure
            raise EngineError(f"a turn of the engine failed: {type(cause).__name__}: {cause}") from cause
        if self.failure is not None:
            raise EngineError(self.failure)

    def fail(self, cause: BaseException | str) -> None:
        """Ends the loop for everybody; the first cause counts."""
        with self.lock:
            if self.failure is None:
                self.failure = cause
            self._in_turn = False
            self.tickets.clear()
            for waiter in self._waiters:
                waiter.notify()

    def end(self, why: str) -> None:
        """As if a turn had failed; returns when no thread turns the loop any more."""
        self.fail(why)
        waiter = threading.Condition(self.lock)
        with self.lock:
            self._waiters[waiter] = lambda: False
            while self._driver_thread is not None:
                waiter.wait()
            del self._waiters[waiter]
            self._wake()

    @property
    def _is_asleep(self) -> bool:
        return self.is_paused and not self._poked

    def _turn(self) -> None:
        try:
            with self.lock:
                self.check_alive()
                self._check_progress()
                self._in_turn, self._poked = True, False
                recorder = self.recorder
                if self.scheduler.watch is not recorder:
                    self.scheduler.watch = recorder
            (recorder or self.driver).turn(self.scheduler.turn())
            self._turns += 1
            ended = time.perf_counter()
            with self.lock:
                told = self._deliver()
                if recorder is not None:
                    recorder.end_turn(ended, time.perf_counter() if told else ended)
                self._in_turn = False
                for waiter, done in self._waiters.items():
                    if done():
                        waiter.notify()
            if self.scheduler.only_compiles:
                time.sleep(GRAMMAR_POLL)
        except EngineError:
            raise
        except BaseException as e:
            if self.leave is not None:
                self.leave(e)
            self.fail(e)
            if isinstance(e, Exception):
                self.check_alive()
            raise

    def _check_progress(self) -> None:
        """Raises RuntimeError where turns would go on for ever: a fault of the scheduler, better told than spun on."""
        s = self.scheduler
        if self.tickets and s.is_idle:
            raise RuntimeError(f"request {next(iter(self.tickets))!r} was lost")
        moved = s.launches != self._launches or s.is_pending
        self._launches = s.launches
        self._still_turns = 0 if moved else self._still_turns + 1
        if self._still_turns > STILL_TURNS and s.has_work:
            raise RuntimeError(f"{s.num_waiting} requests wait and none is admitted, with nothing in flight")

    def _deliver(self) -> bool:
        outputs, tickets = self.scheduler.outputs, self.tickets
        if not outputs:
            return False
        for request, completion_tokens, finished, last in outputs:
            ticket = tickets[request.rid]
            ids = ticket.output_ids
            if last is not None and len(ids) == completion_tokens - 1 and not request.return_logprob:
                ids.append(last)  # one more token, as nearly always
            else:
                ticket.deliver(completion_tokens, finished)
                if finished:
                    del tickets[request.rid]
                    self._let_go(request.rid)
            if finished or not ticket.is_news:
                ticket.call.note(ticket)
        outputs.clear()
        return True

    def _submit_aborts(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if not ticket.finished:
                ticket.abort_asked = True
                if ticket.waits_for is not None:
                    self._let_go(ticket.waits_for)
                self.scheduler.abort(ticket.request.rid, exact=True)

    def _let_go(self, rid: str) -> None:
        """Submits what waits for the request. `collect` may come in between at any point, hence the second look."""
        for ticket in self._held.pop(rid, ()):
            self.scheduler.submit(ticket.request)
            if ticket.abort_asked:
                self.scheduler.abort(ticket.request.rid, exact=True)

    def _poke(self) -> None:
        self._poked = True
        self._wake()

    def _wake(self) -> None:
        """With nobody driving, one sleeper looks whether it has to."""
        if self._driver_thread is None:
            for waiter in self._waiters:
                waiter.notify()
                break
