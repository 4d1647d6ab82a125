"""What the random loads have found, each as a test of its own."""

from harness import EOS, Harness

SPECULATION = {"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}


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
