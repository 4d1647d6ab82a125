"""Ctrl-C while the loop is turned: the call ends, the engine goes on."""

import signal

import pytest
from helpers_engine import check_all_back, host_engine, oracle

from jaxoverlap.interrupts import HeldInterrupts


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """A process started in the background ignores SIGINT from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def held_by(*steps):
    """What of `steps` ran before the interrupt came out."""
    ran = []
    try:
        with HeldInterrupts():
            for step in steps:
                ran.append(step)
                step()
    except KeyboardInterrupt:
        return ran
    raise AssertionError("no interrupt came out")


def nothing():
    pass


def test_the_first_waits_for_the_end():
    assert held_by(interrupt, nothing, nothing) == [interrupt, nothing, nothing]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_does_not_wait():
    assert held_by(interrupt, nothing, interrupt, nothing) == [interrupt, nothing, interrupt]


def test_a_handler_set_meanwhile_stays():
    with HeldInterrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class InterruptingRunner:
    """Ctrl-C arrives while the host waits for the third result."""

    def __init__(self, runner):
        self.runner, self.waits = runner, 0

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def wait(self, handle):
        self.waits += 1
        if self.waits == 3:
            interrupt()
        return self.runner.wait(handle)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_outlives_an_interrupted_call(stream):
    engine = host_engine(wrap=InterruptingRunner)
    params = {"max_new_tokens": 50, "temperature": 0.0, "ignore_eos": True}
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(input_ids=[5, 6], sampling_params=params, stream=stream))
    after = engine.generate(input_ids=[7, 8], sampling_params={"max_new_tokens": 6, "temperature": 0.0})
    assert after["output_ids"] == oracle([7, 8], 6)
    check_all_back(engine)
