"""Ranks in several processes under jax.distributed: how a process joins, and how all end when one fails.

Turns meet in every step, so that a rank which is gone would leave the others waiting for ever. What goes wrong is told
through the key-value store of the coordination service that jax.distributed runs. A process whose turn fails writes the
cause there and ends. One that dies without a word breaks the others' collectives; whoever notices calls the roll, and
writes down who does not answer. In every process a watcher reads: it answers the roll, and ends the process once there
is a cause. JAX's heartbeats find what a watcher cannot, a machine that is gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import jax

from jaxoverlap.parallel.group import RankError

HEARTBEAT_S = 10
POLL_S = 0.25
ROLL_CALL_S = 3.0
_BROKEN = ("gloo", "nccl", "connection closed", "connection reset")  # of collectives whose other end is gone
_KEYS = "jaxoverlap/"
_FAILED, _ROLL_CALL, _HERE = (_KEYS + name for name in ("failed", "roll_call", "here/"))


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


class Watcher:
    """Ends this process, which serves `ranks`, when a cause is written down anywhere; until `stop`."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        threading.Thread(target=self._watch, name="jaxoverlap-ranks", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

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
        count = len(self._ranks)
        return ", ".join(f"{_named(range(p * count, (p + 1) * count))} (process {p}) is gone" for p in gone)

    def _end(self, cause: str) -> NoReturn:
        self._ending.acquire()  # the watcher and the thread that turns may both come here
        _say(f"{_named(self._ranks)}: ending: {cause}")
        if jax.process_index() == 0:
            time.sleep(4 * POLL_S)  # the service ends with its process; the others read first
        os._exit(1)


def _client() -> Any:
    """JAX has no public door to the key-value store of its coordination service."""
    from jax._src import distributed

    return distributed.global_state.client


def _named(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _say(text: str) -> None:
    os.write(2, f"jaxoverlap: {text}\n".encode())
