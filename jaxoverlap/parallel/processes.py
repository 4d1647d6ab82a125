"""Ranks in several processes under jax.distributed: how a process joins, and how all end when one fails.

Turns meet in every step, so that a rank which is gone would leave the others waiting for ever. What goes wrong is told
through the key-value store of the coordination service that jax.distributed runs. A process whose turn fails writes the
cause there and ends. One that dies without a word breaks the others' collectives; whoever notices calls the roll, and
writes down who does not answer. One that shuts its engine down, or exits, says that it has left; whoever still waits
for it in an exchange ends. In every process a watcher reads all this, and answers the roll. A machine that is gone is
found by JAX's own heartbeats.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from jaxoverlap.parallel.group import RankError

HEARTBEAT_S = 10
POLL_S = 0.25
ROLL_CALL_S = 3.0
_BROKEN = ("gloo", "nccl", "connection closed", "connection reset")  # of collectives whose other end is gone
_KEYS = "jaxoverlap/"
_FAILED, _ROLL_CALL, _HERE, _LEFT = (_KEYS + name for name in ("failed", "roll_call", "here/", "left/"))
_watchers = itertools.count()
LEFT_S = 2.0  # in an exchange with a process that has left; its last one may still be on its way


def join(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """jax.distributed.initialize, with heartbeats that find a dead machine in about ten seconds. Without arguments JAX
    finds them from Slurm, Open MPI or Kubernetes. Before JAX starts."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of the exchange, on the host platform
    given = None not in (coordinator_address, num_processes, process_id)
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        cluster_detection_method="deactivate" if given else None,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=2 * HEARTBEAT_S,
    )


def process_count() -> int:
    """As jax.process_count, but does not start JAX's backends."""
    return _state().num_processes or 1 if jax.distributed.is_initialized() else 1


class Watcher:
    """Ends this process, which serves `ranks`, when a cause is written down anywhere; until `stop`."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._left = f"{_LEFT}{next(_watchers)}/"  # of this engine, which every process makes as the same one
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._meeting_since: float | None = None
        atexit.register(self.stop)
        threading.Thread(target=self._watch, name="jaxoverlap-ranks", daemon=True).start()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While the others are waited for."""
        self._meeting_since = time.monotonic()
        yield
        self._meeting_since = None

    def stop(self) -> None:
        """This process has left. Twice is once."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        with contextlib.suppress(Exception):  # the service has ended
            _client().key_value_set(f"{self._left}{jax.process_index()}", "")

    def leave(self, error: BaseException) -> NoReturn:
        """Ends this process, in which a turn has failed with `error`, with the cause on stderr; soon all others end
        too. An ordinary exit would wait for the others in jax.distributed's own barrier."""
        traceback.print_exception(error)
        sys.stderr.flush()
        if any(sign in str(error).lower() for sign in _BROKEN):
            _say(f"{_named(self._ranks)}: a collective broke, looking for the process that is gone")
            cause = self._call_the_roll()
        else:
            cause = str(error)
            if not isinstance(error, RankError):
                cause = f"{_named(self._ranks)}: {type(error).__name__}: {cause}"
        with contextlib.suppress(Exception):  # somebody has written first, or the coordinator is gone
            _client().key_value_set(_FAILED, cause)
        self._end(cause)

    def _watch(self) -> None:
        answered = False
        while not self._stopped.wait(POLL_S):
            try:
                keys = dict(_client().key_value_dir_get(_KEYS))
                if _ROLL_CALL in keys and not answered:
                    answered = True
                    _client().key_value_set(f"{_HERE}{jax.process_index()}", "")
            except Exception:
                return  # the service has ended, and JAX ends the process if it should not have
            if _FAILED in keys:
                self._end(keys[_FAILED])
            since = self._meeting_since
            if since is not None and time.monotonic() - since > LEFT_S:
                left = sorted(int(key.rsplit("/", 1)[1]) for key in keys if key.startswith(self._left))
                if left:
                    cause = ", ".join(f"{self._of(p)} (process {p}) has left" for p in left)
                    with contextlib.suppress(Exception):
                        _client().key_value_set(_FAILED, cause)
                    self._end(cause)

    def _call_the_roll(self) -> str:
        try:
            _client().key_value_set(_ROLL_CALL, "", allow_overwrite=True)  # others may be calling too
            time.sleep(ROLL_CALL_S)
            there = {int(key.rsplit("/", 1)[1]) for key, _ in _client().key_value_dir_get(_HERE)}
        except Exception:
            there = set(range(1, jax.process_count()))  # without the coordinator
        gone = sorted(set(range(jax.process_count())) - there)
        if not gone:
            return "a collective broke though every process is there"
        return ", ".join(f"{self._of(p)} (process {p}) is gone" for p in gone)

    def _of(self, process: int) -> str:
        count = len(self._ranks)
        return _named(range(process * count, (process + 1) * count))

    def _end(self, cause: str) -> NoReturn:
        self._ending.acquire()  # the watcher and the thread that turns may both come here
        _say(f"{_named(self._ranks)}: ending: {cause}")
        if jax.process_index() == 0:
            time.sleep(4 * POLL_S)  # the service ends with its process; the others read first
        os._exit(1)


def _client() -> Any:
    return _state().client


def _state() -> Any:
    """JAX has no public door to the key-value store of its coordination service."""
    from jax._src import distributed

    return distributed.global_state


def _named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _say(text: str) -> None:
    os.write(2, f"jaxoverlap: {text}\n".encode())
