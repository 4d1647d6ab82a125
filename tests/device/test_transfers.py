"""What goes up and down with a decode step, page size 16: nothing up while rows stay and no page is taken."""

import jax
import numpy as np
import pytest

from jaxoverlap.device import fetching
from jaxoverlap.models.checksum import ChecksumConfig

from .helpers import Driver, make_request, make_runner

ORACLE = ChecksumConfig().oracle
PAGE = 16


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "poison"])
def runner(request):
    runner = make_runner(page_size=PAGE, poison_future_map=request.param)
    runner.warm_up()
    yield runner
    runner.shutdown()


def uploads(runner, monkeypatch):
    """Arrays from the host in each of the runner's calls from now on, which JAX itself is told to refuse otherwise."""
    counts = []
    call = type(runner)._call

    def spy(self, program, *args):
        counts.append(sum(isinstance(a, np.ndarray) for a in jax.tree.leaves(args)))
        with jax.transfer_guard_host_to_device("disallow" if counts[-1] == 0 else "allow"):
            return call(self, program, *args)

    monkeypatch.setattr(type(runner), "_call", spy)
    return counts


def test_nothing_goes_up_while_rows_stay_and_no_page_is_taken(runner, monkeypatch):
    d = Driver(runner, PAGE)
    d.start(1, make_request([1, 2, 3]))
    d.start(2, make_request([9] * 7))
    d.run([(1, 3), (2, 7)])
    counts = uploads(runner, monkeypatch)
    expected = []
    for step in range(40):
        took_page = any(d.lens[slot] % PAGE == 0 for slot in (1, 2))
        expected.append(int(took_page or step == 0))
        d.run((), [1, 2])
    assert counts == expected
    assert sum(expected) == 5
    for rows in ([2, 1], [1], [1]):  # other rows: an upload, and nothing stale
        d.run((), rows)
    assert counts[40:] == [1, 1, 0]
    assert d.outputs[1] == ORACLE([1, 2, 3], 44)
    assert d.outputs[2] == ORACLE([9] * 7, 42)


def test_a_prefill_in_between_does_not_matter(runner, monkeypatch):
    """The rows that decode are the same before and after; what another slot does meanwhile is not theirs."""
    d = Driver(runner, PAGE)
    d.start(1, make_request([4, 5]))
    d.start(3, make_request([6] * 20))
    d.run([(1, 2)])
    d.run((), [1])
    counts = uploads(runner, monkeypatch)
    d.run((), [1])
    d.run([(3, 20)])
    d.run((), [1])
    assert counts == [0, 1, 0]
    d.run((), [1, 3])
    assert d.outputs[1] == ORACLE([4, 5], 5)
    assert d.outputs[3] == ORACLE([6] * 20, 2)


def test_one_array_comes_down(runner, monkeypatch):
    d = Driver(runner, PAGE)
    d.start(1, make_request([1, 2, 3]))
    d.run([(1, 3)])
    fetched = []
    fetch = fetching.fetch
    monkeypatch.setattr(fetching, "fetch", lambda array: fetched.append(array) or fetch(array))
    for _ in range(5):
        launched = d.launch((), [1])
        d.take(launched)
    assert len(fetched) == 5
    outputs = launched[1].outputs
    assert fetched[-1] is outputs.fetched
    assert d.outputs[1] == ORACLE([1, 2, 3], 6)
