"""Random loads over every policy, pool and page size, with the books audited after every turn (bugs.md H1-H3)."""

from __future__ import annotations

import os

import pytest
from harness import Harness
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from host_runner import oracle

EXAMPLES = int(os.environ.get("RANDOM_LOADS", "60"))


@st.composite
def loads(draw):
    page = draw(st.sampled_from([1, 1, 2, 4, 16]))
    pool = max(draw(st.integers(6, 24)) * 4, 4 * page)
    pool = -(-pool // page) * page
    chunk = draw(st.sampled_from([-1, 4, 8, 16]))
    if chunk > 0:
        chunk = -(-chunk // page) * page
    speculative = draw(st.sampled_from([0, 0, 0, 3]))
    config = {
        "page_size": page,
        "max_total_tokens": pool,
        "max_running_requests": draw(st.integers(1, 5)),
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": draw(st.sampled_from([15, 32, 16384])),
        "schedule_policy": draw(st.sampled_from(["fcfs", "lpm", "lof", "dfs-weight", "random"])),
        "enable_mixed_chunk": chunk > 0 and not speculative and draw(st.booleans()),
        "disable_radix_cache": draw(st.booleans()),
        "stream_interval": draw(st.integers(1, 3)),
        "init_new_token_ratio": draw(st.sampled_from([0.02, 0.2, 0.7])),
        "retract_decode_steps": draw(st.integers(1, 5)),
        "disable_consecutive_prefill_overlap": draw(st.booleans()),
        "strict_aliasing": draw(st.booleans()),
        "enable_priority_scheduling": draw(st.booleans()),
        "schedule_low_priority_values_first": draw(st.booleans()),
        "overrun": draw(st.sampled_from(["sglang", "skip-known"])) if not speculative else "sglang",
        "random_seed": 0,
    }
    if speculative:
        config |= {"speculative_num_steps": 2, "speculative_num_draft_tokens": speculative}
    prefix = draw(st.lists(st.integers(100, 900), min_size=0, max_size=12))
    ops = []
    for i in range(draw(st.integers(1, 9))):
        own = draw(st.lists(st.integers(100, 900), min_size=1, max_size=14))
        prompt = prefix[: draw(st.integers(0, len(prefix)))] + own
        most = min(60, pool - 7)
        op = {"prompt": prompt[: max(1, most)], "max_new_tokens": draw(st.integers(1, 20)), "at": draw(st.integers(0, 12))}
        op["ignore_eos"] = draw(st.booleans())
        op["priority"] = draw(st.sampled_from([None, 0, 5, 50]))
        if draw(st.integers(0, 3)) == 0:
            op["script"] = {draw(st.integers(0, 10)): 2}
        ops.append(("request", f"r{i}", op))
        if draw(st.integers(0, 5)) == 0:
            ops.append(("abort", f"r{i}", {"at": op["at"] + draw(st.integers(0, 8))}))
    if draw(st.integers(0, 5)) == 0:
        at = draw(st.integers(1, 10))
        ops.append(("pause", draw(st.sampled_from(["in_place", "retract"])), {"at": at}))
        ops.append(("resume", "", {"at": at + draw(st.integers(1, 3))}))
    return config, ops


def play(config, ops, overlap):
    scripts = {rid: op["script"] for kind, rid, op in ops if kind == "request" and "script" in op}
    h = Harness(scripts=scripts, disable_overlap_schedule=not overlap, context_length=256, **config)
    for turn in range(30):
        for kind, rid, op in ops:
            if op["at"] != turn:
                continue
            if kind == "request":
                if len(op["prompt"]) <= h.scheduler.max_prompt_len:
                    h.submit(rid, op["prompt"], op["max_new_tokens"], priority=op["priority"], ignore_eos=op["ignore_eos"])
            elif kind == "abort":
                h.scheduler.abort(rid)
            elif kind == "pause":
                h.scheduler.pause(rid)
            else:
                h.scheduler.resume()
        h.turn()
    return h.run()


def check(config, ops):
    aborted = {rid for kind, rid, _ in ops if kind == "abort"}
    runs = [play(config, ops, overlap) for overlap in (False, True)]
    for h in runs:
        starved = {rid for rid, r in h.requests.items() if r.finish_reason.type == "abort"} - aborted
        assert all(h.requests[rid].finish_reason.status_code == 500 for rid in starved)
        h.check(aborted | starved)
    both = set(runs[0].requests) - aborted
    for rid in both:
        if all(r.requests[rid].finish_reason.type != "abort" for r in runs):
            assert runs[0].outputs(rid) == runs[1].outputs(rid)
    return runs


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], derandomize=EXAMPLES == 60)
@given(loads())
def test_overlap_equals_normal_equals_oracle(load):
    check(*load)
