"""The order of the waiting queue, policy by policy, against orders worked out by hand."""

from collections import deque

import numpy as np
import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Request
from jaxoverlap.memory.kv_cache import KVCache
from jaxoverlap.memory.slots import SlotTable
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.policy import make_policy


def order(waiting, cached=(), **settings):
    """Ids in the order of the policy; `cached`: token sequences that the tree holds."""
    kv = KVCache(SlotTable(4, 512, 1), 4096, prefix_cache=not settings.get("disable_radix_cache"), bigram=False)
    for ids in cached:
        key = np.array(ids, np.int64)
        kv.tree.insert(key, kv.pages.alloc(len(key)))
    return [r.rid for r in make_policy(EngineConfig(**settings), kv).order(deque(waiting))]


def request(rid, prompt=(1,), max_new=8, priority=None, arrival=0):
    r = Request(rid, np.array(prompt, np.int32), SamplingParams(max_new_tokens=max_new), priority=priority)
    r.max_new_tokens, r.arrival = max_new, arrival
    return r


def requests(*pairs, **more):
    return [request(rid, prompt, arrival=i, **more) for i, (rid, prompt) in enumerate(pairs)]


def test_fcfs_leaves_the_queue_alone():
    waiting = deque(requests(("b", [2]), ("a", [1])))
    policy = make_policy(EngineConfig(), None)
    assert policy.order(waiting) is waiting


def test_lof_takes_the_largest_cap_first_and_keeps_ties():
    waiting = [request(rid, max_new=n) for rid, n in [("a", 3), ("b", 9), ("c", 3), ("d", 12), ("e", 9)]]
    assert order(waiting, schedule_policy="lof") == ["d", "b", "e", "a", "c"]


def test_random_is_a_permutation_by_seed():
    waiting = [request(str(i)) for i in range(40)]
    rids = [r.rid for r in waiting]
    first = order(waiting, schedule_policy="random", random_seed=1)
    assert sorted(first) == sorted(rids)
    assert first != rids
    assert first == order(waiting, schedule_policy="random", random_seed=1)
    assert first != order(waiting, schedule_policy="random", random_seed=2)


# lpm

CACHED = [list(range(100, 140))]


def test_lpm_takes_the_longest_cached_prefix_first_and_keeps_ties():
    waiting = requests(
        ("none", [5, 6]),
        ("ten", [*range(100, 110), 7]),
        ("forty", [*range(100, 140), 7]),
        ("also ten", [*range(100, 110), 8]),
    )
    assert order(waiting, CACHED, schedule_policy="lpm") == ["forty", "ten", "also ten", "none"]


def test_lpm_counts_what_a_request_could_use():
    """The last token of a prompt is always computed, so that a fully cached prompt matches one token less."""
    waiting = requests(("39 of 40", [*range(100, 139), 1]), ("39 of 39+1", list(range(100, 140))))
    assert order(waiting, CACHED, schedule_policy="lpm") == ["39 of 40", "39 of 39+1"]


@pytest.mark.parametrize(("waiting", "first"), [(128, "cached"), (129, "r0")])
def test_lpm_is_fcfs_above_128_waiting(waiting, first):
    pairs = [(f"r{i}", [i + 1, i + 1]) for i in range(waiting - 1)] + [("cached", list(range(100, 140)))]
    assert order(requests(*pairs), CACHED, schedule_policy="lpm")[0] == first


@pytest.mark.parametrize(
    ("shared", "want"),
    [(31, ["a", "b", "other", "c"]), (32, ["a", "other", "b", "c"]), (40, ["a", "other", "b", "c"])],
)
def test_lpm_puts_those_last_that_share_32_tokens_with_one_that_waits(shared, want):
    prefix = list(range(200, 200 + shared))
    waiting = requests(("a", [*prefix, 1, 0]), ("b", [*prefix, 2, 0]), ("other", [5, 6, 7]), ("c", [*prefix, 3, 0]))
    assert order(waiting, schedule_policy="lpm") == want


@pytest.mark.parametrize(("cached", "want"), [(32, ["a", "short", "b"]), (33, ["a", "b", "short"])])
def test_lpm_with_more_than_32_cached_tokens_waits_for_no_other(cached, want):
    prefix = list(range(300, 300 + cached))
    like = [*prefix, *range(400, 440)]
    waiting = requests(("a", [*like, 1]), ("short", [300, 301, 302]), ("b", [*like, 2]))
    assert order(waiting, [prefix], schedule_policy="lpm") == want


# dfs-weight


def test_dfs_weight_takes_the_heavier_branch_first():
    light, heavy = [10, 11, 12], [20, 21, 22]
    waiting = requests(
        ("light", [*light, 1]),
        ("heavy 1", [*heavy, 1]),
        ("nothing", [9, 9]),
        ("heavy 2", [*heavy, 2]),
        ("heavy 3", [*heavy, 3]),
    )
    got = order(waiting, [light, heavy], schedule_policy="dfs-weight")
    assert got == ["heavy 1", "heavy 2", "heavy 3", "light", "nothing"]


def test_dfs_weight_takes_a_node_after_what_is_below_it():
    """Root - stem - (left, right): the stem weighs 4, more than `far`'s 3, though its own row is one."""
    stem = [10, 11]
    left, right, far = [*stem, 12, 13], [*stem, 14, 15], [30, 31]
    waiting = requests(
        ("far 1", [*far, 1]),
        ("far 2", [*far, 2]),
        ("stem", [*stem, 1]),
        ("right 1", [*right, 1]),
        ("far 3", [*far, 3]),
        ("left", [*left, 1]),
        ("right 2", [*right, 2]),
    )
    got = order(waiting, [left, right, far], schedule_policy="dfs-weight")
    assert got == ["right 1", "right 2", "left", "stem", "far 1", "far 2", "far 3"]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_policies_of_the_tree_are_fcfs_without_one(policy):
    waiting = requests(("a", [1, 2]), ("b", list(range(100, 140))))
    assert order(waiting, schedule_policy=policy, disable_radix_cache=True) == ["a", "b"]


# priorities

PRIORITIES = [("a", 1, 5), ("b", 7, 5), ("c", None, 9), ("d", 7, 9), ("e", -3, 5)]


@pytest.mark.parametrize(
    ("policy", "low_first", "want"),
    [
        ("fcfs", False, ["b", "d", "a", "e", "c"]),
        ("fcfs", True, ["e", "a", "b", "d", "c"]),
        ("lof", False, ["d", "b", "a", "e", "c"]),
        ("lof", True, ["e", "a", "d", "b", "c"]),
    ],
)
def test_priorities_come_first_and_none_is_the_lowest(policy, low_first, want):
    waiting = [request(rid, max_new=n, priority=p, arrival=i) for i, (rid, p, n) in enumerate(PRIORITIES)]
    settings = {"schedule_policy": policy, "enable_priority_scheduling": True}
    assert order(waiting, schedule_low_priority_values_first=low_first, **settings) == want


def test_priorities_count_only_where_they_are_enabled():
    waiting = [request(rid, max_new=n, priority=p, arrival=i) for i, (rid, p, n) in enumerate(PRIORITIES)]
    assert order(waiting) == ["a", "b", "c", "d", "e"]


def test_among_equal_priorities_the_older_entry_goes_first():
    """A request that was put back entered the queue again, behind those that were there."""
    waiting = [request("back", priority=1, arrival=9), request("there", priority=1, arrival=3)]
    assert order(waiting, enable_priority_scheduling=True) == ["there", "back"]
