"""What a run notes beside its trace: the schedule, and how far memory rose."""

import subprocess
import sys

import pytest
from helpers_engine import host_engine

from jaxoverlap.compare.schedule import ScheduleLog

EXTEND = {"event": "launch", "mode": "EXTEND", "requests": [0], "seq_lens": [3], "extend_lens": [3], "prefix_lens": [0]}
RESULT = {"event": "result"}


def decode(length):
    return {"event": "launch", "mode": "DECODE", "requests": [0], "seq_lens": [length]}


@pytest.mark.parametrize(
    ("normal", "want"),
    [
        (True, [EXTEND, RESULT, decode(4), RESULT, decode(5), RESULT]),
        # the last launch is under way when the end is seen
        (False, [EXTEND, decode(4), RESULT, decode(5), RESULT, decode(6), RESULT, RESULT]),
    ],
)
def test_the_schedule_of_one_request(normal, want):
    with host_engine(wrap=ScheduleLog, disable_overlap_schedule=normal) as engine:
        for _ in range(2):  # ids and slots differ, the schedule does not
            engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 3, "temperature": 0.0})
            assert engine.flush_cache()
            assert engine.runner.take() == want
        assert engine.runner.take() == []


GIVEN_BACK = """
import numpy as np
from jaxoverlap.compare.memory import PeakMemory
with PeakMemory() as memory:
    np.ones(60_000_000, np.uint8)
print(memory.rise)
"""


def test_memory_that_was_given_back_counts():
    # in a process of its own, where nothing else allocates or gives back
    told = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True).stdout.strip()
    if told == "None":
        pytest.skip("this system does not tell")
    assert 55_000_000 < int(told) < 90_000_000
