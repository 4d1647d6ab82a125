"""Bug reports from users of such engines, as tests of the scheduler (tests/README.md lists them)."""

from __future__ import annotations

import numpy as np
import pytest
from harness import EOS, Harness
from host_runner import oracle

from jaxoverlap.core import ForwardMode, Launch, Wait

LOOPS = pytest.mark.parametrize("normal", [False, True], ids=["overlap", "normal"])
PAGES = pytest.mark.parametrize("page", [1, 4])


def launches_with(h, rid):
    return [x for x in h.runner.launches if any(r.rid == rid for r in x.requests)]


@LOOPS
def test_h1_pending_token_survives_many_prefills(normal):
    h = Harness(max_running_requests=4, max_total_tokens=512, disable_overlap_schedule=normal)
    h.submit("a", [11, 12], max_new_tokens=8)
    for i in range(40):
        h.submit(f"b{i}", [20 + i, 30 + i, 40 + i], max_new_tokens=1)
    h.run().check()


@LOOPS
def test_h1_pending_token_survives_a_chunked_prefill(normal):
    h = Harness(chunked_prefill_size=8, max_total_tokens=512, disable_overlap_schedule=normal)
    h.submit("a", [11, 12], max_new_tokens=8)
    h.turn()
    h.submit("b", list(range(100, 180)), max_new_tokens=4)
    h.run().check()
    assert sum(x.chunked is not None for x in h.runner.launches) >= 9


@LOOPS
@PAGES
def test_h2_retraction_with_a_step_in_flight(normal, page):
    h = Harness(
        max_total_tokens=80,
        page_size=page,
        init_new_token_ratio=0.05,
        retract_decode_steps=2,
        disable_overlap_schedule=normal,
    )
    for i in range(4):
        h.submit(f"r{i}", list(range(100 + 10 * i, 108 + 10 * i)), max_new_tokens=24, ignore_eos=True)
    h.run().check()
    assert h.scheduler.counters.retracted > 0
    for rid, r in h.requests.items():
        assert len(r.output_ids) == 24
        assert h.streamed[rid] == h.expected(rid)


def test_h2_a_lone_request_is_clamped_at_admission():
    h = Harness(max_total_tokens=64)
    r = h.submit("a", list(range(100, 108)), max_new_tokens=100)
    h.run().check()
    assert r.max_new_tokens == 64 - 8 - 1 - 1  # semantics: total - ceil_page(prompt) - page - 1
    assert r.finish_reason.type == "length"
    assert h.scheduler.counters.retracted == 0


@PAGES
@pytest.mark.parametrize("seed", range(20))
def test_h3_slot_and_pages_reused_right_behind_an_overrun(page, seed):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(100, 900, int(rng.integers(2, 9))).tolist() for _ in range(6)]
    stops = int(rng.integers(0, 6))
    h = Harness(
        max_running_requests=1, max_total_tokens=48, page_size=page, scripts={f"r{i}": {stops: EOS} for i in range(6)}
    )
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, max_new_tokens=10)
    h.run().check()
    assert h.scheduler.counters.dropped_rows >= 6 - 1


@pytest.mark.parametrize("n", [1, 2, 8])
def test_h4_launches_of_a_request_that_ends_by_length(n):
    sglang = Harness()
    sglang.submit("a", [11, 12, 13], max_new_tokens=n)
    sglang.run().check()
    assert len(launches_with(sglang, "a")) == n + 1  # the overrun included, as in the traces

    skip = Harness(overrun="skip-known")
    skip.submit("a", [11, 12, 13], max_new_tokens=n)
    skip.run().check()
    modes = [x.mode for x in launches_with(skip, "a")]
    assert modes == [ForwardMode.EXTEND] + [ForwardMode.DECODE] * (n - 1)
    assert skip.outputs("a") == sglang.outputs("a")


@pytest.mark.parametrize("overrun", ["sglang", "skip-known"])
def test_h4_no_position_reaches_the_context_length(overrun):
    h = Harness(context_length=64, max_total_tokens=512, overrun=overrun)
    longest = h.scheduler.max_prompt_len
    assert longest == 63 - 6  # a prompt of min(context, total) - 1 - 5 tokens or more is refused
    h.submit("a", list(range(100, 100 + longest)), max_new_tokens=1)
    h.submit("b", list(range(200, 200 + longest)), max_new_tokens=100)
    h.run().check()
    assert max(int(x.seq_lens.max()) for x in h.runner.launches) < 64


def test_h4_steps_saved_over_a_load():
    def steps(overrun):
        h = Harness(overrun=overrun, max_total_tokens=1024)
        for i in range(12):
            h.submit(f"r{i}", [50 + i, 60 + i], max_new_tokens=1 + i % 3)
        h.run().check()
        return h.scheduler.counters.launches, sum(len(x.requests) for x in h.runner.launches)

    needed = sum(1 + i % 3 for i in range(12))
    (plain_steps, plain_rows), (steps_left, rows_left) = steps("sglang"), steps("skip-known")
    assert plain_rows > needed
    assert rows_left == needed
    assert steps_left < plain_steps


# H19: an abort, wherever the request is. `at` turns pass before it.


@LOOPS
@pytest.mark.parametrize("at", range(8))
def test_h19_abort_of_a_running_request(normal, at):
    h = Harness(max_running_requests=1, disable_overlap_schedule=normal)
    h.submit("a", [11, 12, 13], max_new_tokens=100, ignore_eos=True)
    h.submit("b", [21, 22, 23], max_new_tokens=5)
    for _ in range(at):
        h.turn()
    h.scheduler.abort("a")
    h.scheduler.abort("a")
    h.scheduler.abort("nobody")
    for _ in range(4):
        h.turn()
    a = h.requests["a"]
    assert a.finished
    assert a.finish_reason.type == "abort"
    h.run().check(aborted={"a"})
    h.scheduler.abort("a")
    h.scheduler.abort("b")
    h.run().check(aborted={"a"})


@LOOPS
def test_h19_abort_while_queued_ends_at_once(normal):
    h = Harness(max_running_requests=1, disable_overlap_schedule=normal)
    h.submit("a", [11, 12, 13], max_new_tokens=20, ignore_eos=True)
    h.submit("b", [21, 22, 23])
    h.turn()
    h.turn()
    h.scheduler.abort("b")
    h.turn()
    assert h.final["b"] == 0
    assert not h.requests["a"].finished
    h.run().check(aborted={"b"})


@LOOPS
@pytest.mark.parametrize("at", range(6))
def test_h19_abort_in_the_middle_of_a_prompt(normal, at):
    h = Harness(chunked_prefill_size=8, disable_overlap_schedule=normal)
    h.submit("long", list(range(100, 140)), max_new_tokens=6)
    h.submit("b", [21, 22, 23], max_new_tokens=5)
    for _ in range(at):
        h.turn()
    h.scheduler.abort("long")
    h.run().check(aborted={"long"})


@LOOPS
def test_h19_abort_all(normal):
    h = Harness(max_running_requests=2, disable_overlap_schedule=normal)
    for i in range(6):
        h.submit(f"r{i}", [11 + i, 12, 13], max_new_tokens=50, ignore_eos=True)
    h.turn()
    h.turn()
    h.scheduler.abort(abort_all=True)
    h.run(limit=5).check(aborted=set(h.requests))


def test_launch_is_asked_before_the_last_result_is_waited_for():
    h = Harness()
    h.submit("a", [11, 12, 13], max_new_tokens=4)
    h.turn()
    asked = h.turn()
    assert [type(x) for x in asked] == [Launch, Wait]
    assert asked[0].number == 2
    assert asked[1].launch.number == 1


def test_consecutive_prefill_switch_waits_before_the_launch():
    h = Harness(disable_consecutive_prefill_overlap=True)
    h.submit("a", [11, 12, 13])
    h.turn()
    h.submit("b", [21, 22, 23])
    assert [type(x) for x in h.turn()] == [Wait, Launch]


def test_oracle_of_this_file_is_the_rule_of_the_readme():
    h = 7
    for i, t in enumerate([807, 814, 821, 828, 835]):
        h = (h * 31 + (t + 1) * (i % 13 + 1)) % 1_000_003
    assert oracle([807, 814, 821, 828, 835], 1) == [10 + h % 900]
    assert oracle([807, 814, 821, 828, 835], 4) == [476, 61, 41, 689]  # trace 01
