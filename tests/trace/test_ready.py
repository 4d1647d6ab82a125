"""When a recorder sees steps ready, of a runner that does not tell: by hand, on a clock of its own."""

import numpy as np
import pytest

from jaxoverlap.core import ForwardMode, Launch, StepResult, Wait
from jaxoverlap.trace import recorder as module
from jaxoverlap.trace.recorder import RESOLUTION, Recorder

STEP = 10e-3


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Device:
    """Steps of 10 ms, one after the other; a launch takes 1 ms of the host. Counts who asks whether one is ready."""

    def __init__(self, clock):
        self.clock, self.free, self.looks = clock, 0.0, []

    def launch(self, launches):
        self.free = max(self.free, self.clock.now) + STEP
        self.clock.now += 1e-3
        return [self.free]

    def wait(self, ready):
        self.clock.now = max(self.clock.now, ready)
        return StepResult(np.zeros(1, np.int32))

    def is_ready(self, ready):
        self.looks.append(self.clock.now)
        return self.clock.now >= ready


def launch(number):
    nothing = np.zeros(1, np.int32)
    writes = np.zeros((3, 0), np.int32)
    return Launch(number, ForwardMode.DECODE, [None], nothing, nothing, nothing, None, None, None, 1, writes)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def run(clock, parts, steps=4, device=None):
    """The overlap loop with `parts` of host work a turn, in seconds; the trace, and the looks of each turn."""
    device = device or Device(clock)
    recorder = Recorder(device)
    before, looks = None, []

    def turn(number):
        nonlocal before
        clock.now += parts["receive"]
        recorder.mark("receive")
        clock.now += parts["compose"]
        now = launch(number)
        handle = yield now
        if before is not None:
            yield Wait(*before)
            clock.now += parts["process"]
            recorder.mark("process")
            clock.now += parts["stream"]
            recorder.mark("stream")
        before = now, handle

    for number in range(1, steps + 1):
        device.looks.clear()
        recorder.turn(turn(number))
        looks.append(len(device.looks))
    return recorder.trace(), looks


def test_a_host_that_keeps_up_sees_steps_ready_as_it_waits_for_them(clock):
    trace, looks = run(clock, {"receive": 1e-5, "compose": 3e-5, "process": 2e-5, "stream": 1e-5})
    assert [(s.begin, s.end) for s in trace.device] == [
        (pytest.approx(begin), pytest.approx(begin + STEP)) for begin in (4e-5, 4e-5 + STEP, 4e-5 + 2 * STEP)
    ]
    assert looks[2:] == [2, 2]  # before the launch and after it; the parts are shorter than RESOLUTION


@pytest.mark.parametrize(("late", "turn"), [("process", 2), ("stream", 2), ("compose", 3)])
def test_a_late_host_sees_them_at_the_end_of_the_part_in_which_they_became_ready(clock, late, turn):
    parts = {"receive": 1e-5, "compose": 3e-5, "process": 2e-5, "stream": 1e-5, late: 15e-3}
    trace, looks = run(clock, parts)
    step = trace.device[1]
    assert step.launch == 2
    assert step.length > STEP
    longest = max((s for s in trace.host if s.turn == turn), key=lambda s: s.length)
    assert longest.kind == late
    assert step.end == longest.end
    assert max(looks) <= 5


def test_a_part_is_looked_at_once_the_resolution_has_passed(clock):
    part = 0.6 * RESOLUTION
    _, looks = run(clock, {"receive": part, "compose": part, "process": part, "stream": part})
    assert looks[2:] == [3, 3]  # at "stream", before the launch and after it


def test_a_step_computed_inside_the_launch_ends_with_it(clock):
    class Now(Device):
        def launch(self, launches):
            self.clock.now += STEP
            return [self.clock.now]

    trace, _ = run(clock, {"receive": 1e-5, "compose": 3e-5, "process": 2e-5, "stream": 1e-5}, device=Now(clock))
    launches = [(s.begin, s.end) for s in trace.host if s.kind == "launch"]
    assert [(s.begin, s.end) for s in trace.device] == launches
