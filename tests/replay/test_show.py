"""The replay to read: that it says what happened, and that its reasons are those of the scheduler."""

import io
import re

import pytest
from helpers_replay import TRACES, host_runner, request, scenario
from rich.console import Console

from jaxoverlap.replay.play import record
from jaxoverlap.replay.scenario import load_scenario
from jaxoverlap.replay.show import show


def text(s, width=160, turns=True, reasons=True, **settings):
    out = io.StringIO()
    loops = [record(s, overlap, host_runner, **settings) for overlap in (False, True)]
    show(Console(file=out, width=width), s, *loops, turns=turns, reasons=reasons)
    return out.getvalue()


def trace(name):
    return load_scenario(next(TRACES.glob(f"{name}_*.json")))


def columns(s, **more):
    """({turn: lines} of normal, the same of overlap), cut out of the page at its middle."""
    loops, turn = ({}, {}), None
    for line in text(s, width=160, **more).splitlines():
        if head := re.match(r"turn (\d+)", line):
            turn = int(head[1])
        elif turn is not None:
            for loop, half in zip(loops, (line[:80], line[80:])):
                loop.setdefault(turn, []).append(half.strip())
    return loops


def said(lines):
    """The lines of a turn as one text, folds undone."""
    return re.sub(r"\s+", " ", " ".join(lines))


def reasons(s, overlap=True, **settings):
    """{turn: reasons} as the scheduler gave them."""
    recorder = record(s, overlap, host_runner, **settings)[0]
    return dict(enumerate(recorder.reasons))


# --show


def test_both_loops_stand_beside_each_other():
    normal, overlap = columns(trace("01"))
    assert normal[1][0] == overlap[1][0] == "EXTEND    a 0+5"
    assert "order     run1  sample  process1" in normal[1]
    assert "order     run1  sample  push1" in overlap[1]
    assert "order     run2  sample  push2  pop1  process1" in overlap[2]
    assert "commits   a +1 (length)" in normal[4]
    assert "commits   a +1 (length)" in overlap[5]
    assert "DECODE    a @9" in overlap[5]
    assert "drops     a" in overlap[6]
    assert "kv 504 free, 8 cached, 0 locked slots 8 free" in said(normal[4])
    assert "kv 503 free, 9 cached, 0 locked" in said(overlap[5])
    assert "running a  in flight 1" in overlap[5]
    assert "no batch" in normal[5]


def test_arrivals_stand_in_the_turns_head():
    page = text(trace("37"))
    assert re.search(r"^turn \d+ .*\+ \w+ \(\d+ tokens, at most \d+ out\)", page, re.M)
    assert re.search(r"^turn 3 .*pause in_place", page, re.M)
    assert re.search(r"^turn 6 .*continue", page, re.M)


def test_rows_of_every_kind():
    page = text(trace("09"))
    assert re.search(r"MIXED     L 0\+\d+…  d1 @\d+", page)
    page = text(trace("08"))
    assert "EXTEND    L 16+4  s 0+4…" in page
    assert "mid-chunk L" in page
    page = text(trace("34"))
    assert re.search(r"accepts   \w+ [123]", page)
    page = text(trace("21"))
    assert "puts back r2" in page


def test_ranks_stand_one_below_the_other():
    page = text(trace("51"))
    assert page.index("\nrank 0 ─") < page.index("\nrank 1 ─")
    assert re.search(r"IDLE      all ranks \[\d+, 0\]|IDLE      all ranks \[0, \d+\]", page)


def test_totals_close_it():
    page = text(trace("02"))
    assert re.search(r"2 launches, .*4 launches", page)


@pytest.mark.parametrize("width", [40, 80, 99, 100, 130, 160, 250])
def test_no_line_is_wider_than_the_terminal(width):
    page = text(trace("21"), width=width)
    assert max(map(len, page.splitlines())) <= width
    labels = [line for line in page.splitlines() if line.startswith("overlap EXTEND")]
    assert bool(labels) == (width < 100)


def test_a_narrow_terminal_loses_nothing():
    """Every word of the wide page is on the narrow one, folded or not."""
    wide, narrow = (re.sub(r"\W", "", text(trace("21"), width=w)) for w in (250, 80))
    for word in ("r2sresultisdropped", "putsbackr2", "31launches"):
        assert word in wide
        assert word in narrow


# --explain


def test_reasons_alone_name_the_batch_and_leave_the_rest_out():
    page = text(trace("01"), turns=False)
    assert "EXTEND    a 0+5" in page
    assert "why       a joins: 5 tokens, 0 cached" in page
    assert "order" not in page
    assert "kv " not in page


def test_turns_alone_give_no_reasons():
    assert "why" not in text(trace("01"), reasons=False)


def test_where_a_result_is_handled():
    _, overlap = columns(trace("01"), turns=False)
    assert "launch 1 finds no result in flight" in said(overlap[1])
    assert "overlap: launch 5 is under way while result 4 is handled" in said(overlap[5])
    assert "nothing is launched, so only result 5 is handled" in said(overlap[6])
    assert "a's result is dropped: it was over before" in said(overlap[6])
    assert "idle" in said(overlap[7])
    assert not any("overlap:" in said(lines) for lines in columns(trace("01"), turns=False)[0].values())


def test_consecutive_prefills():
    _, overlap = columns(trace("05"), turns=False)
    for turn in (2, 3):
        assert "no overlap: a prefill behind a prefill" in said(overlap[turn])
        assert f"result {turn - 1} is handled before launch {turn}" in said(overlap[turn])
    assert not any("no overlap" in said(lines) for lines in columns(trace("04"), turns=False)[1].values())


def test_both_aliasing_quirks_are_named_where_they_decide():
    mixed = "the batch launched last was a prefill, its live object is not: strict_aliasing is True"
    assert mixed in reasons(trace("62"))[3]
    strict = reasons(trace("62"), strict_aliasing=False)[3]
    assert "no overlap: a prefill behind a prefill" in strict
    ranks = record(trace("52"), True, host_runner)
    assert (
        "the batch launched last was not a prefill, its live object is: strict_aliasing is True" in ranks[1].reasons[3]
    )


def test_grammar():
    assert "no overlap: a verify step with a grammar row" in reasons(trace("35"))[1]
    _, overlap = columns(trace("31"), turns=False)
    assert "delayed sampling: launch 2 has a grammar row and waits for result 1" in said(overlap[2])
    assert any("wait for their grammar" in said(why) for why in reasons(trace("33")).values())


def test_a_full_batch_a_retraction_and_the_bubble():
    why = reasons(trace("21"))
    assert "nobody is admitted: batch_is_full since an earlier turn, 1 wait" in why[12]
    assert "the next step's KV did not fit: r2 put back" in why[13]
    assert "r2's result is dropped: it was put back before" in why[13]
    bubble = "every running row had ended: nothing to run, and batch_is_full is off only now (waiting: 2)"
    assert bubble in why[16]
    assert bubble in reasons(trace("21"), overlap=False)[15]


def test_no_tokens_names_what_is_needed_and_left():
    """a takes 10 + 20 + 1 of 40; b may need 8 + 4 + 1, and 9 are left."""
    s = scenario(
        (0, "request", request("a", 10, 20)), (0, "request", request("b", 8, 4, first=300)), max_total_tokens=40
    )
    assert "b waits: it may need 13 tokens of KV, 9 are not promised: batch_is_full" in reasons(s)[0]


def test_slots_budget_and_chunks():
    ops = [(0, "request", request(rid, 10, 2, first=100 * i)) for i, rid in enumerate("abc")]
    why = reasons(scenario(*ops, max_running_requests=2))
    assert "no place for c beside 0 running, 2 chosen: batch_is_full" in why[0]
    assert "nobody is admitted: 2 rows run, 0 slots are free: batch_is_full" in why[1]
    assert "nobody is admitted: batch_is_full since an earlier turn, 1 wait" in why[2]
    why = reasons(scenario(*ops, max_prefill_tokens=15))
    assert "b waits: 10 tokens, max_prefill_tokens leaves 5" in why[0]
    why = reasons(scenario(*ops, chunked_prefill_size=16))
    assert "b joins with a chunk of 6 of its 10 tokens" in why[0]
    assert "the step has all the prompt tokens it may have" in why[0]
    assert "b goes on with its prompt: 4 of 4 tokens left" in why[1]


def test_prefill_first_and_mixed():
    ops = [(0, "request", request("a", 4, 9)), (2, "request", request("b", 4, 2, first=300))]
    assert "prefill first: the running rows wait (1)" in reasons(scenario(*ops))[2]
    mixed = scenario(*ops, chunked_prefill_size=16, enable_mixed_chunk=True)
    assert "mixed: the running rows decode in the same step (1)" in reasons(mixed)[2]
    assert "no prefill: the running rows decode (1)" in reasons(mixed)[1]


def test_pause_abort_and_preemption():
    assert "paused: nothing is composed" in reasons(trace("37"))[4]
    assert "abort of L, found in the middle of its prompt" in reasons(trace("18"))[3]
    assert "hi has priority over lo2" in reasons(trace("42"))[3]


def test_skip_known_says_what_it_skips():
    s = scenario((0, "request", request("a", 4, 2)), (0, "request", request("b", 4, 6, first=300)))
    assert "no step for 1 rows whose last token is in flight" in reasons(s, overrun="skip-known")[2]


def test_an_idle_rank():
    ranks = record(trace("51"), True, host_runner)
    said_by_ranks = [text for r in ranks for why in r.reasons for text in why]
    assert any(text.startswith("idle batch: nothing to run here") for text in said_by_ranks)
