"""Ranks in several processes under jax.distributed on loopback; and all end when one does."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "rank_process.py"


class Running:
    """The processes of one run; none outlives it."""

    def __init__(self, folder, processes, local, what, number, **environ):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **environ}
        self.out = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(processes)]
        self.all = []
        for i, (out, err) in enumerate(self.out):
            command = [sys.executable, str(SCRIPT), *map(str, (i, processes, local, port)), what, str(number)]
            with out.open("w") as stdout, err.open("w") as stderr:
                self.all.append(subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()
            process.wait()

    def end(self, i, timeout):
        """Exit status and stderr of one."""
        status = self.all[i].wait(timeout)
        return status, self.out[i][1].read_text()

    def told(self, timeout):
        """What each printed, if all ended well: a list of objects."""
        lines = []
        for i, (out, _) in enumerate(self.out):
            status, stderr = self.end(i, timeout)
            assert status == 0, f"process {i}: {stderr[-3000:]}"
            lines.append([json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")])
        return lines


def check_loads(folder, processes, local, count):
    with Running(folder, processes, local, "loads", count) as running:
        of = running.told(600)
    assert all(len(lines) == count for lines in of)
    for lines in zip(*of):
        assert len({line["launches"] for line in lines}) == 1
    assert sum(line["requests"] for lines in of for line in lines) > count
    assert sum(line["idle"] for lines in of for line in lines) > 0


@pytest.mark.soak
def test_two_processes(tmp_path):
    check_loads(tmp_path, 2, 2, 4)


@pytest.mark.soak
def test_four_processes(tmp_path):
    check_loads(tmp_path, 4, 1, 12)


@pytest.mark.soak
@pytest.mark.parametrize(("processes", "local"), [(2, 1), (2, 2), (4, 1)])
def test_a_hundred_random_loads(tmp_path, processes, local):
    check_loads(tmp_path, processes, local, 100)


@pytest.mark.slow
def test_every_process_calls_generate(tmp_path):
    """With prompts of its own, or none; all return when all are done."""
    with Running(tmp_path, 2, 1, "engine", 3) as running:
        first, second = running.told(120)
    assert [line["requests"] for line in first] == [0, 0, 0]
    assert [line["requests"] for line in second] == [2, 2, 2]
    assert [line["launches"] for line in first] == [line["launches"] for line in second]


@pytest.mark.soak
def test_a_malformed_request_of_one_process(tmp_path):
    """It gets its error when the others are done, and they do not wait for ever."""
    with Running(tmp_path, 2, 1, "refused", 0) as running:
        first, second = running.told(120)
    assert [sorted(line) for line in first] == [["refused"]] * 3
    assert second == [{"served": 1}] * 3


def check_ends(running, victim, names, within=30.0):
    """The victim's end, and within the time all others', non-zero, with stderr that names its rank."""
    running.all[victim].wait(120)
    begin = time.monotonic()
    for i in range(len(running.all)):
        if i != victim:
            status, stderr = running.end(i, max(1.0, within - (time.monotonic() - begin)))
            assert status != 0
            assert re.search(names, stderr), stderr[-3000:]


@pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.soak)]
)
def test_one_is_killed_in_the_middle_of_a_turn(tmp_path, processes):
    with Running(tmp_path, processes, 1, "killed", 20, VICTIM="1") as running:
        check_ends(running, 1, r"rank 1 \(process 1\) is gone")
        assert running.all[1].returncode == -9


@pytest.mark.soak
def test_the_coordinator_is_killed(tmp_path):
    """JAX itself ends the others, at once: whichever is first has said who."""
    with Running(tmp_path, 2, 1, "killed", 20, VICTIM="0") as running:
        check_ends(running, 0, r"rank 0 \(process 0\) is gone|leader task|task 0")


@pytest.mark.slow
def test_an_exception_in_one_ranks_turn(tmp_path):
    with Running(tmp_path, 2, 2, "raises", 20, VICTIM="1") as running:
        status, stderr = running.end(1, 120)
        assert status == 1
        assert "ending: rank 2: KeyError: 'a fault of this rank'" in stderr
        status, stderr = running.end(0, 30)
        assert status == 1
        assert "ranks 0 to 1: ending: rank 2: KeyError: 'a fault of this rank'" in stderr


@pytest.mark.slow
def test_one_that_makes_fewer_calls(tmp_path):
    """Whoever goes on waits for a process that has left, and is told so."""
    with Running(tmp_path, 2, 1, "left", 2) as running:
        assert running.end(1, 120)[0] != 0  # its exit meets the other's end
        status, stderr = running.end(0, 30)
        assert status == 1
        assert "rank 0: ending: rank 1 (process 1) has left" in stderr


@pytest.mark.parametrize(("number", "what"), [(0, "chunked_prefill_size"), (1, "the weights")])
def test_processes_that_are_not_alike(tmp_path, number, what):
    with Running(tmp_path, 2, 1, "unlike", number, FOLDER=str(tmp_path)) as running:
        for i in range(2):
            status, stderr = running.end(i, 120)
            assert status != 0
            assert f"not the same in all processes: {what}" in stderr
