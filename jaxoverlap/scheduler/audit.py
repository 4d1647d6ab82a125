"""Are the books in order? `check_leaks` at every idle moment, `audit` after every turn where asked for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from jaxoverlap.core import Request

if TYPE_CHECKING:
    from jaxoverlap.memory.radix import Node
    from jaxoverlap.scheduler.scheduler import Scheduler


class AuditError(RuntimeError):
    """Pages, slots or locks do not add up; the message says which."""


def check_leaks(s: Scheduler) -> None:
    """Nothing runs: every slot is free, and every page is free or in the tree, unlocked."""
    kv = s.kv
    total = kv.pages.available_tokens + kv.tree.evictable_tokens
    if total != s.max_total_tokens or kv.tree.protected_tokens:
        raise AuditError(
            f"KV pool leak: {kv.pages.available_tokens} tokens free + {kv.tree.evictable_tokens} cached "
            f"of {s.max_total_tokens}, {kv.tree.protected_tokens} locked while idle"
        )
    if s.slots.num_free != s.slots.num_slots:
        raise AuditError(f"slot leak: {s.slots.num_free} of {s.slots.num_slots} free while idle")


def audit(s: Scheduler) -> None:
    """Each page is in exactly one of free list, request and tree; locks equal the requests that hold them; slots are
    free or held once. Linear in the pool: for tests and debugging."""
    holders = residents(s)
    held = [r.slot for r in holders]
    if sorted([*held, *s.slots.free_slots()]) != list(range(1, s.slots.num_slots + 1)):
        raise AuditError(f"slots held {sorted(held)} and free {s.slots.free_slots()} are not 1 .. {s.slots.num_slots}")
    audit_pages(s, holders)
    audit_locks(s, holders)


def residents(s: Scheduler) -> list[Request]:
    """Every request that holds a slot."""
    found: dict[int, Request] = {}
    batches = [s.running_batch, s.last_batch, s.cur_batch]
    rows = [r for b in batches if b is not None for r in b.requests]
    rows += [r for launch, _ in s.result_queue for r in launch.requests] + ([s.chunked] if s.chunked else [])
    for r in rows:
        if r.table is not None:
            found[r.slot] = r
    return list(found.values())


def audit_pages(s: Scheduler, holders: list[Request]) -> None:
    kv, page = s.kv, s.config.page_size
    owned = [kv.pages.free_pages(), *(node.pages for node in kv.tree.nodes())]
    for r in holders:
        last = -(-int(s.slots.allocated_len[r.slot]) // page)
        owned.append(s.slots.page_table[r.slot, r.protected_len // page : last])
    count = np.bincount(np.concatenate(owned), minlength=kv.pages.num_pages + 1)
    wrong = np.flatnonzero(count[1:] != 1) + 1
    if len(wrong) or count[0]:
        raise AuditError(f"pages in no place or in several: {wrong[:8].tolist()} (page 0: {count[0]} times)")


def audit_locks(s: Scheduler, holders: list[Request]) -> None:
    locks: Counter[Node] = Counter()
    for r in holders:
        node = r.last_node
        while node is not None and node.parent is not None:
            locks[node] += 1
            node = node.parent
    for node in s.kv.tree.nodes():
        if node.lock_ref != locks[node]:
            raise AuditError(f"a tree node is locked {node.lock_ref} times, but {locks[node]} requests hold it")
