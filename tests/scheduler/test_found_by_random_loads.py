"""What the random loads have found, each as a test of its own."""

from harness import EOS, Harness

SPECULATION = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_num_draft_tokens": 3}


def test_abort_shows_no_token_behind_a_stop():
    h = Harness(max_running_requests=1, scripts={"a": {1: EOS}}, **SPECULATION)
    h.submit("a", [100], max_new_tokens=5)
    h.turn()
    h.turn()
    h.scheduler.abort("a")
    h.run().check(aborted={"a"})


def test_abort_of_a_request_that_may_generate_nothing():
    h = Harness(max_total_tokens=48, page_size=16)
    h.submit("a", [100], max_new_tokens=0)
    h.turn()
    h.scheduler.abort("a")
    h.run().check(aborted={"a"})


def test_a_prompt_that_would_wait_for_ever_is_over_the_limit():
    h = Harness(max_total_tokens=64, page_size=16)
    longest = h.scheduler.max_prompt_len
    assert longest == 32  # 33 tokens take 3 pages; a page in reserve and one token to come do not fit beside them
    h.submit("a", list(range(100, 100 + longest)), max_new_tokens=30)
    h.run().check()
    assert len(h.outputs("a")) >= 1


def test_a_request_that_may_generate_nothing_joins_a_mixed_batch():
    h = Harness(chunked_prefill_size=8, enable_mixed_chunk=True)
    h.submit("a", [1, 2, 3], max_new_tokens=12)
    for _ in range(4):
        h.turn()
    h.submit("b", [9, 8], max_new_tokens=0)
    h.run().check()


def test_a_pause_in_mode_abort_leaves_nobody_out():
    h = Harness(max_running_requests=1)
    h.submit("a", [1, 2, 3], max_new_tokens=1)
    h.submit("b", [4, 5], max_new_tokens=1)
    h.turn()
    h.scheduler.pause("abort")
    h.turn()
    h.scheduler.resume()
    h.run(limit=20).check()


def test_skip_known_holds_in_a_mixed_batch():
    h = Harness(chunked_prefill_size=8, enable_mixed_chunk=True, overrun="skip-known")
    h.submit("a", [1, 2, 3], max_new_tokens=4)
    h.turn()
    h.turn()
    h.submit("b", list(range(100, 140)), max_new_tokens=2)
    h.run().check()
    assert sum(any(r.rid == "a" for r in x.requests) for x in h.runner.launches) == 4
