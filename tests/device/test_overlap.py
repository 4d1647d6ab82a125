"""Order, not time: with slow steps the host is ahead of the device, and nothing it then does changes a running step."""

import itertools

import jax
import numpy as np
import pytest

from jaxoverlap.models.checksum import ChecksumConfig

from .helpers import Driver, SlowModel, make_request, make_runner

ORACLE = ChecksumConfig().oracle


@pytest.fixture(scope="module")
def slow():
    turns = 60 if jax.default_backend() == "cpu" else 6000
    runner = make_runner(SlowModel(turns), max_running_requests=2, chunked_prefill_size=8)
    runner.warm_up()
    yield runner
    runner.shutdown()


def test_the_next_launch_returns_while_a_step_runs(slow):
    d = Driver(slow)
    d.start(1, make_request([1, 2, 3]))
    pending = d.launch([(1, 3)])
    for _ in range(5):
        following = d.launch((), [1])
        assert not slow.is_ready(following[1])
        assert not slow.is_ready(pending[1])  # the launch did not wait for the step before
        d.take(pending)
        assert slow.is_ready(pending[1])
        assert not slow.is_ready(following[1])  # nor did taking its result wait for the one behind
        pending = following
    slow.block(pending[1])
    assert slow.is_ready(pending[1])
    d.take(pending)
    assert d.outputs[1] == ORACLE([1, 2, 3], 6)


@pytest.mark.gpu
def test_the_order_on_a_gpu(slow):
    test_the_next_launch_returns_while_a_step_runs(slow)


def test_arrays_of_a_launch_may_be_rewritten_at_once(slow):
    """What the host does to its own arrays after a launch does not reach the step, which has not begun."""
    d = Driver(slow)
    d.start(1, make_request([1, 2, 3]))
    d.start(2, make_request([4]))
    pending = []
    for step in range(20):
        launch, handle, counted = d.launch([(1, 3), (2, 1)] if step == 0 else (), [1, 2] if step else ())
        slots = launch.slots.copy()
        for name in ("slots", "seq_lens", "extend_lens", "prefix_lens", "input_ids", "page_writes"):
            array = getattr(launch, name)
            if array is not None:
                array[...] = 1
        launch.slots[...] = slots
        pending.append((launch, handle, counted))
        if len(pending) > 2:
            d.take(pending.pop(0))
    for launched in pending:
        d.take(launched)
    assert d.outputs[1] == ORACLE([1, 2, 3], 20)
    assert d.outputs[2] == ORACLE([4], 20)


def test_no_array_that_went_up_is_written_again(slow, monkeypatch):
    """Every array passed to a program stays as it was passed, until the end, and no two share memory."""
    passed = []
    call = type(slow)._call

    def spy(self, program, *args):
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        passed.extend((a, a.copy()) for a in arrays)
        assert len(arrays) == 1
        return call(self, program, *args)

    monkeypatch.setattr(type(slow), "_call", spy)
    d = Driver(slow)
    d.start(1, make_request([1, 2, 3]))
    pending = [d.launch([(1, 3)])]
    for _ in range(12):
        pending.append(d.launch((), [1]))
        if len(pending) > 2:
            d.take(pending.pop(0))
    for launched in pending:
        d.take(launched)
    assert len(passed) == 13
    for array, copy in passed:
        np.testing.assert_array_equal(array, copy)
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a, _ in passed)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
