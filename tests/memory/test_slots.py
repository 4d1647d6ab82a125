"""The slot table against lists and a deque."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.core import FinishReason, Request
from jaxoverlap.memory.slots import SlotTable
from jaxoverlap.sampling_params import SamplingParams


def request(rid="a", prompt=(5, 6, 7), max_new=4, **more):
    params = SamplingParams(max_new_tokens=max_new, stop=more.pop("stop", None))
    return Request(rid, np.array(prompt, np.int32), params, max_new_tokens=max_new, **more)


def i32(*values):
    return np.array(values, np.int32)


def at(*slots_or_places):
    return np.array(slots_or_places, np.intp)


def test_attach_writes_the_row():
    table = SlotTable(2, 16, 4)
    r = request(stream=True, stop_ids=(2, 9))
    table.attach(r, stream_interval=3)
    assert r.slot == 1
    assert r.table is table
    assert table.tokens[1, :3].tolist() == [5, 6, 7]
    assert (table.prompt_len[1], table.output_len[1], table.max_new[1]) == (3, 0, 4)
    assert (table.committed_len[1], table.allocated_len[1]) == (0, 0)
    assert set(table.stop_ids[1].tolist()) == {2, 9, -1}
    assert (table.stream[1], table.stream_interval[1]) == (True, 3)
    assert table.num_free == 1


def test_lengths_and_places_are_of_the_type_that_indexes():
    table = SlotTable(3, 16, 4)
    table.attach(request(), 1)
    rows = table.rows(np.array([1]), np.array([0]))
    lens = table.append_rows(rows, i32(50), None)
    columns = ("prompt_len", "output_len", "committed_len", "allocated_len", "verify_len", "max_new")
    assert all(x.dtype == np.intp for x in (rows.starts, rows.caps, lens, *(getattr(table, c) for c in columns)))


def test_slots_go_out_in_the_order_in_which_they_came_back():
    table = SlotTable(3, 8, 1)
    first, second, third = (request(rid) for rid in "abc")
    for r in (first, second, third):
        table.attach(r, 1)
    assert [first.slot, second.slot, third.slot] == [1, 2, 3]
    for r in (second, third, first):
        table.detach(r)
    assert table.free_slots() == [2, 3, 1]
    table.attach(first, 1)
    assert first.slot == 2


def test_outputs_survive_the_slot_and_come_back():
    table = SlotTable(1, 16, 1)
    r, other = request(), request("b", prompt=(8,))
    table.attach(r, 1)
    table.append(at(r.slot), i32(50), np.array([-0.5], np.float32))
    table.append(at(r.slot), i32(51), np.array([-1.5], np.float32))
    epoch = table.epoch[1]
    table.detach(r)
    assert table.epoch[1] == epoch + 1
    assert (r.slot, r.table) == (0, None)
    table.attach(other, 1)
    assert other.output_len == 0
    table.append(at(other.slot), i32(60), None)
    table.detach(other)
    assert r.output_ids.tolist() == [50, 51]
    table.attach(r, 1)
    table.append(at(r.slot), i32(52), np.array([-2.5], np.float32))
    assert r.output_ids.tolist() == [50, 51, 52]
    assert r.output_logprobs.tolist() == [-0.5, -1.5, -2.5]


def test_append_touches_the_given_rows_only():
    table = SlotTable(3, 16, 1)
    rows = [request(rid, prompt=range(n, 2 * n)) for rid, n in zip("abc", (2, 5, 3))]
    for r in rows:
        table.attach(r, 1)
    table.append(at(3, 1), i32(70, 71), None)
    assert [r.output_ids.tolist() for r in rows] == [[71], [], [70]]
    assert table.output_logprobs(3).tolist() == [0.0]


def test_an_old_logprob_does_not_reach_the_next_owner():
    table = SlotTable(1, 8, 1)
    a, b = request("a"), request("b")
    table.attach(a, 1)
    table.append(at(1), i32(50), np.array([-3.0], np.float32))
    table.detach(a)
    table.attach(b, 1)
    table.append(at(1), i32(50), np.array([-4.0], np.float32))
    assert b.output_logprobs.tolist() == [-4.0]


def test_more_stop_ids_than_columns_widen_them_for_all():
    table = SlotTable(2, 8, 1)
    a, b = request("a", stop_ids=(2,)), request("b", stop_ids=tuple(range(10, 17)))
    table.attach(a, 1)
    table.attach(b, 1)
    assert set(table.stop_ids[a.slot].tolist()) == {2, -1}
    assert set(table.stop_ids[b.slot].tolist()) == set(range(10, 17))
    table.detach(b)
    c = request("c", stop_ids=(3,))
    table.attach(c, 1)
    assert set(table.stop_ids[c.slot].tolist()) == {3, -1}


@pytest.mark.parametrize(
    ("more", "by_hand"),
    [({}, False), ({"stop": "x"}, True), ({"to_finish": FinishReason("abort")}, True), ({"grammar": object()}, True)],
)
def test_which_rows_python_looks_at(more, by_hand):
    table = SlotTable(1, 8, 1)
    table.attach(request(**more), 1)
    assert table.by_hand[1] == by_hand


def test_page_writes_carry_the_last_page_of_an_entry():
    table = SlotTable(2, 16, 4)
    table.set_pages(at(1, 1), at(0, 1), i32(7, 8))
    table.set_pages(at(2), at(0), i32(9))
    table.set_pages(at(1), at(1), i32(5))
    writes = table.take_page_writes()
    assert writes.dtype == np.int32
    assert writes.T.tolist() == [[1, 0, 7], [1, 1, 5], [2, 0, 9], [1, 1, 5]]
    assert table.take_page_writes().shape == (3, 0)


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("tgs"), st.integers(0, 7)), max_size=60))
def test_page_writes_keep_a_copy_in_step(slots, steps):
    """A device that applies the writes of each launch has the table's page table, whatever happened between."""
    table = SlotTable(slots, 7, 1)
    device = np.zeros_like(table.page_table)
    free, residents, waiting = deque(range(1, slots + 1)), [], [request(f"r{i}") for i in range(slots)]
    for kind, n in steps:
        if kind == "t" and waiting and free:
            r = waiting.pop(0)
            table.attach(r, 1)
            assert r.slot == free.popleft()
            table.set_pages(np.full(n, r.slot), np.arange(n), np.arange(n) + 10 * r.slot + n)
            residents.append(r)
        elif kind == "g" and residents:
            r = residents.pop(n % len(residents))
            free.append(r.slot)
            table.detach(r)
            waiting.append(r)
        elif kind == "s":
            rows, index, pages = table.take_page_writes()
            order = np.random.default_rng(n).permutation(len(rows))
            device[rows[order], index[order]] = pages[order]
            assert np.array_equal(device, table.page_table)
        assert table.free_slots() == list(free)


def test_gathered_rows_follow_the_table():
    table = SlotTable(3, 16, 1)
    a, b = request("a", stop_ids=(2, 9), stream=True), request("b", prompt=(8,), max_new=6, stream=True)
    table.attach(a, 1)
    table.attach(b, 1)
    slots = at(2, 1)
    epochs = table.epoch[slots]
    rows = table.rows(slots, epochs)
    assert table.rows(slots, epochs) is rows
    assert rows.starts.tolist() == [2 * table.tokens.shape[1] + 1, table.tokens.shape[1] + 3]
    assert rows.caps.tolist() == [6, 4]
    assert [ids.tolist() for ids in rows.stops] == [[-1, 2], [-1, 9]]
    assert (rows.all_live, rows.by_hand, rows.streams_each, rows.streams_none) == (True, None, True, False)
    table.look_at(b)
    rows = table.rows(slots, epochs)
    assert rows.by_hand.tolist() == [True, False]
    assert not rows.streams_each
    table.detach(b)
    rows = table.rows(slots, epochs)
    assert rows.live.tolist() == [False, True]
    assert not rows.all_live
    table.attach(request("c", stream=True), 2)
    table.attach(request("d"), 1)
    one = at(3)
    assert not table.rows(one, table.epoch[one]).streams_each  # every second token only
    other = at(2)
    rows = table.rows(other, table.epoch[other])
    assert rows.streams_none
    assert table.rows(at(2), rows.epochs) is not rows


@given(st.lists(st.lists(st.sampled_from([1, 2, 3]), unique=True, min_size=1), min_size=1, max_size=8))
def test_append_rows_is_append_for_a_batch(batches):
    """Against lists: each batch appends one token a row."""
    table, lists = SlotTable(3, 16, 1), {1: [], 2: [], 3: []}
    for rid, n in zip("abc", (2, 5, 3)):
        table.attach(request(rid, prompt=range(1, n + 1)), 1)
    for turn, batch in enumerate(batches):
        slots = at(*batch)
        tokens = slots * 10 + turn
        for slot, token in zip(batch, tokens.tolist()):
            lists[slot].append(token)
        rows = table.rows(slots, table.epoch[slots])
        lens = table.append_rows(rows, tokens, tokens.astype(np.float32))
        assert lens.tolist() == [len(lists[slot]) for slot in batch]
        assert table.last_tokens(rows, lens).tolist() == tokens.tolist()
    for slot, expected in lists.items():
        assert table.outputs(slot).tolist() == expected
        assert table.output_logprobs(slot).tolist() == expected


def test_the_writes_of_one_decode_step_are_a_copy():
    table = SlotTable(2, 16, 1)
    slots, index, pages = at(1, 2), at(3, 4), i32(8, 9)
    table.set_pages(slots, index, pages)
    writes = table.take_page_writes()
    assert writes.tolist() == [[1, 2], [3, 4], [8, 9]]
    slots[:] = index[:] = pages[:] = 0
    assert writes.tolist() == [[1, 2], [3, 4], [8, 9]]
