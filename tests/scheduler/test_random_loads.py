"""Random loads over every policy, pool and page size (tests/README.md H1-H3), as a state machine: both loops are given
the same operations, and the books are audited after every turn.

Every request that nobody aborts must end, with the same tokens in both loops and as the oracle says.
"""

from __future__ import annotations

import pytest
from harness import Harness
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

TOKENS = st.integers(100, 900)


@st.composite
def configs(draw):
    page = draw(st.sampled_from([1, 1, 2, 4, 16]))
    drafts = draw(st.sampled_from([0, 0, 0, 3]))
    pool = -(-draw(st.integers(36 if drafts else 24, 100)) // page) * page
    chunk = draw(st.sampled_from([-1, 4, 8, 16]))
    if chunk > 0:
        chunk = -(-chunk // page) * page
    policy = draw(st.sampled_from(["fcfs", "lpm", "lof", "dfs-weight", "random"]))
    priorities = {}
    if policy in ("fcfs", "lof") and draw(st.booleans()):
        priorities = {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": draw(st.booleans()),
            "disable_priority_preemption": draw(st.booleans()),
        }
    return {
        **priorities,
        "page_size": page,
        "max_total_tokens": max(pool, 5 * page if drafts else 3 * page),
        "max_running_requests": draw(st.integers(1, 5)),
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": draw(st.sampled_from([15, 32, 16384])),
        "schedule_policy": policy,
        "enable_mixed_chunk": chunk > 0 and not drafts and draw(st.booleans()),
        "disable_radix_cache": draw(st.booleans()),
        "stream_interval": draw(st.integers(1, 3)),
        "init_new_token_ratio": draw(st.sampled_from([0.02, 0.2, 0.7])),
        "retract_decode_steps": draw(st.integers(1, 5)),
        "disable_consecutive_prefill_overlap": draw(st.booleans()),
        "strict_aliasing": draw(st.booleans()),
        "overrun": draw(st.sampled_from(["sglang", "skip-known"])),
        "finish_order": draw(st.sampled_from(["sglang", "stop-first"])),
        "random_seed": 0,
        "speculative_algorithm": "EAGLE" if drafts else "none",
        "speculative_num_steps": 2 if drafts else 0,
        "speculative_num_draft_tokens": drafts,
    }


class RandomLoads(RuleBasedStateMachine):
    @initialize(config=configs(), shared=st.lists(TOKENS, max_size=12))
    def start(self, config, shared):
        self.shared = shared
        self.both = [Harness(disable_overlap_schedule=normal, context_length=256, **config) for normal in (True, False)]
        self.aborted = set()
        self.is_paused = False

    @rule(
        own=st.lists(TOKENS, min_size=1, max_size=14),
        shared=st.integers(0, 12),
        max_new_tokens=st.integers(0, 20),
        ignore_eos=st.booleans(),
        priority=st.sampled_from([None, 0, 5, 50]),
        eos_at=st.sampled_from([None, None, None, 0, 1, 4, 9]),
        stop=st.sampled_from([None, None, None, "<4", "9><1", "no such text"]),
    )
    def submit(self, own, shared, max_new_tokens, ignore_eos, priority, eos_at, stop):
        rid = f"r{len(self.both[0].requests)}-"
        prompt = (self.shared[:shared] + own)[: self.both[0].scheduler.max_prompt_len]
        config = self.both[0].config
        if config.verify_reserve:  # SGLang's cap leaves no room for it: a request alone may run out of pages
            room = config.max_total_tokens - 2 * config.verify_reserve - 3 * config.page_size
            prompt = prompt[: max(1, room - 1)]
            max_new_tokens = max(0, min(max_new_tokens, room - len(prompt)))
        for h in self.both:
            if eos_at is not None:
                h.scripts[rid] = {eos_at: 2}
            h.submit(rid, prompt, max_new_tokens, priority=priority, ignore_eos=ignore_eos, stop=stop)

    @rule(turns=st.integers(1, 6))
    def turn(self, turns):
        for h in self.both:
            for _ in range(turns):
                h.turn()

    @precondition(lambda self: self.both[0].requests)
    @rule(which=st.integers(0, 1 << 30))
    def abort(self, which):
        rid = list(self.both[0].requests)[which % len(self.both[0].requests)]
        self.aborted.add(rid)
        for h in self.both:
            h.scheduler.abort(rid)

    @precondition(lambda self: self.both[0].requests)
    @rule()
    def abort_all(self):
        self.aborted |= set(self.both[0].requests)
        for h in self.both:
            h.scheduler.abort(abort_all=True)

    @rule(mode=st.sampled_from(["in_place", "retract", "abort"]), flush=st.booleans())
    def pause(self, mode, flush):
        self.is_paused = True
        for h in self.both:
            h.scheduler.pause(mode, flush=flush and mode == "retract")

    @precondition(lambda self: self.is_paused)
    @rule()
    def resume(self):
        self.is_paused = False
        for h in self.both:
            h.scheduler.resume()

    def teardown(self):
        if not hasattr(self, "both"):
            return
        for h in self.both:
            h.scheduler.resume()
            h.run()
            h.check(self.aborted)


def run(examples, **more):
    run_state_machine_as_test(
        RandomLoads,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_random_loads():
    run(60, derandomize=True, phases=[Phase.generate])


@pytest.mark.slow
def test_two_thousand_random_loads():
    run(2000)
