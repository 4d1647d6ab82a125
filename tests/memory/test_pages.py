"""The free list against a deque."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.memory.pages import OutOfPages, PageAllocator


def test_pages_start_at_1_and_go_out_in_order():
    pages = PageAllocator(5, 4)
    assert pages.available_tokens == 20
    assert pages.alloc(3).tolist() == [1, 2, 3]
    assert pages.available_tokens == 8
    assert pages.free_pages().tolist() == [4, 5]


def test_a_freed_page_goes_out_last():
    pages = PageAllocator(4, 1)
    taken = pages.alloc(4)
    pages.free(taken[[2, 0]])
    pages.free(taken[[3, 1]])
    assert pages.alloc(4).tolist() == [3, 1, 4, 2]


def test_too_many_asked_for_names_the_numbers_and_takes_none():
    pages = PageAllocator(3, 1)
    pages.alloc(1)
    with pytest.raises(OutOfPages, match=r"3 pages asked for, 2 of 3 free"):
        pages.alloc(3)
    assert pages.alloc(2).tolist() == [2, 3]


def test_more_freed_than_are_out():
    pages = PageAllocator(3, 1)
    taken = pages.alloc(1)
    with pytest.raises(RuntimeError, match="2 pages freed, but only 1 are out"):
        pages.free(np.concatenate([taken, taken]))


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_any_order_of_taking_and_giving_back(total, steps):
    pages, free, out = PageAllocator(total, 1), deque(range(1, total + 1)), []
    for takes, count in steps:
        if takes:
            if count > len(free):
                with pytest.raises(OutOfPages):
                    pages.alloc(count)
                continue
            want = [free.popleft() for _ in range(count)]
            assert pages.alloc(count).tolist() == want
            out += want
        else:
            back, out = out[1::2][:count], [p for p in out if p not in out[1::2][:count]]
            pages.free(np.array(back, np.int32))
            free.extend(back)
        assert pages.free_pages().tolist() == list(free)
        assert pages.available_tokens == len(free)
