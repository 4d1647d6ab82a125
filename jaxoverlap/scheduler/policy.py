"""The order of the waiting queue (SGLang's SchedulePolicy)."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Request
from jaxoverlap.memory.kv_cache import KVCache
from jaxoverlap.memory.radix import Node, RadixTree
from jaxoverlap.scheduler.waiting import WaitingQueue

LPM_MAX_WAITING = 128  # above it, matching every waiting prompt costs more than it gives
IN_BATCH_THRESHOLD = 32  # tokens


class Policy(Protocol):
    def order(self, waiting: WaitingQueue) -> WaitingQueue:
        """The queue in the order of admission; the same object where nothing moves."""


def make_policy(config: EngineConfig, kv: KVCache) -> Policy:
    name = config.schedule_policy
    if name in ("lpm", "dfs-weight") and config.disable_radix_cache:
        name = "fcfs"
    key = priority_key(config)
    if name == "lpm":
        return LongestPrefix(kv)
    if name == "dfs-weight":
        return DepthFirst(kv)
    if name == "lof":
        return LongestOutput(key)
    if name == "random":
        return Shuffled(config.random_seed)
    return FirstCome(key)


def priority(r: Request, config: EngineConfig) -> int:
    """A request without a priority has the lowest, as in SGLang."""
    if r.priority is not None:
        return r.priority
    return sys.maxsize if config.schedule_low_priority_values_first else -sys.maxsize - 1


def priority_key(config: EngineConfig) -> Callable[[Request], int] | None:
    """Smaller goes first; None where priorities are off."""
    if not config.enable_priority_scheduling:
        return None
    sign = 1 if config.schedule_low_priority_values_first else -1
    return lambda r: sign * priority(r, config)


class FirstCome:
    """fcfs, by priority first where priorities are on."""

    def __init__(self, key: Callable[[Request], int] | None) -> None:
        self.key = key

    def order(self, waiting: WaitingQueue) -> WaitingQueue:
        key = self.key
        return waiting if key is None else WaitingQueue(sorted(waiting, key=lambda r: (key(r), r.arrival)))


class LongestOutput:
    """lof: largest output cap first."""

    def __init__(self, key: Callable[[Request], int] | None) -> None:
        self.key = key or (lambda r: 0)

    def order(self, waiting: WaitingQueue) -> WaitingQueue:
        return WaitingQueue(sorted(waiting, key=lambda r: (self.key(r), -r.max_new_tokens)))


class Shuffled:
    def __init__(self, seed: int | None) -> None:
        self.random = random.Random(seed)

    def order(self, waiting: WaitingQueue) -> WaitingQueue:
        shuffled = list(waiting)
        self.random.shuffle(shuffled)
        return WaitingQueue(shuffled)


class LongestPrefix:
    """lpm: most cached tokens first. A request that shares a prefix with one waiting before it goes last: once that
    one has run, the prefix is cached."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def order(self, waiting: WaitingQueue) -> WaitingQueue:
        if len(waiting) > LPM_MAX_WAITING:
            return waiting
        later = match_waiting(self.kv, waiting)
        return WaitingQueue(sorted(waiting, key=lambda r: float("inf") if r in later else -r.prefix_len))


class DepthFirst:
    """dfs-weight: the tree depth first, the heavier branch first; a node weighs what is matched at it and below."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def order(self, waiting: WaitingQueue) -> WaitingQueue:
        match_waiting(self.kv, waiting)
        at: dict[Node, list[Request]] = defaultdict(list)
        weight: dict[Node, int] = defaultdict(int)
        for r in waiting:
            assert r.last_node is not None
            at[r.last_node].append(r)
            node: Node | None = r.last_node
            while node is not None:
                weight[node] += 1
                node = node.parent
        ordered: list[Request] = []
        stack = [(self.kv.tree.root, False)]
        while stack:
            node, children_done = stack.pop()
            if children_done:
                ordered.extend(at[node])
                continue
            stack.append((node, True))
            heavy = sorted((c for c in node.children.values() if c in weight), key=lambda c: -weight[c])
            stack.extend((c, False) for c in reversed(heavy))
        return WaitingQueue(ordered)


def match_waiting(kv: KVCache, waiting: WaitingQueue) -> set[Request]:
    """Matches every waiting prompt; returns those that share a prefix with an earlier one that is not cached yet."""
    seen, later = RadixTree(kv.page_size), set()
    for r in waiting:
        ids = r.context_ids()[:-1]
        kv.match(r, ids)
        if r.prefix_len > IN_BATCH_THRESHOLD:
            continue
        key = kv.key(ids)
        pages, _ = seen.match(key)
        if len(pages) * kv.page_size >= IN_BATCH_THRESHOLD:
            later.add(r)
        else:
            seen.insert(key, key[:: kv.page_size].astype("int32"))
    return later
