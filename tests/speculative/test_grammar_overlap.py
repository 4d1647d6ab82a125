"""speculative_grammar_overlap: verify steps with grammar rows are launched before the result in flight is handled."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_engine import SeeingDriver, check_all_back
from test_grammars import PROMPT, TOTAL, backend, check_ended, drafting, engine, expected, runner

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))
from test_engine_grammars import params, random_load, run_load

from jaxoverlap.core import ForwardMode, Launch

__all__ = ["backend", "runner"]  # fixtures


class Notes(SeeingDriver):
    """What turns asked for, by launch number."""

    def __init__(self, runner):
        super().__init__(runner, self.see)
        self.asked, self.known = [], []

    def see(self, ask):
        launch = ask if type(ask) is Launch else ask.launch
        self.asked.append((type(ask).__name__, launch.number))
        if type(ask) is Launch and launch.mode is ForwardMode.DECODE:
            self.known.append(launch.mask is not None)


def order_of(runner, backend, **settings):
    """The events of one constrained request, its tokens, the times that the overlap was off."""
    served = engine(runner, backend, "overlap", **settings)
    notes = served._loop.driver = Notes(runner)
    result = served.generate(input_ids=PROMPT, sampling_params=params(9, regex="[a-z]{20}"))
    served.wait_idle()
    assert result["output_ids"] == expected(backend, PROMPT, params(9, regex="[a-z]{20}"))
    check_all_back(served)
    return notes, served.metrics()["overlap_disabled"]


@pytest.mark.slow
@drafting("alphabet")  # most of the grammars allow letters, and the model does not pick them
def test_drafts_are_launched_before_the_result_in_flight_is_waited_for(runner, backend):
    """Launch N, wait for N-1, ask for the drafts of N, score N; by default the wait comes first."""
    for overlaps in (False, True):
        notes, disabled = order_of(runner, backend, speculative_grammar_overlap=overlaps)
        steps = range(2, 1 + max(number for _, number in notes.asked))
        assert len(steps) > 2
        assert notes.asked[0] == ("Launch", 1)
        for i, n in enumerate(steps):
            first = [("Launch", n), ("Wait", n - 1)]
            wanted = [*(first if overlaps else first[::-1]), ("Drafts", n), ("Sample", n)]
            assert notes.asked[1 + 4 * i : 5 + 4 * i] == wanted
        assert disabled == (0 if overlaps else len(notes.known))
        assert not any(notes.known) if overlaps else all(notes.known)


@pytest.mark.soak
@drafting("illegal", "right", "ngram", "mixed")
def test_random_loads(backend, runner):
    """Grammar rows and free ones, aborts, and rows put back for want of pages: the tokens are the oracle's."""
    compiled = runner.compiles
    retracted = disabled = 0
    for seed in range(16):
        pressure = {"init_new_token_ratio": 0.05, "retract_decode_steps": 2} if seed % 2 else {}
        load = random_load(np.random.default_rng(seed), *((8, 44) if pressure else (60, 40)))
        total = 96 if pressure else TOTAL
        served = engine(runner, backend, "overlap", total, speculative_grammar_overlap=True, **pressure)
        for (_, prompt, sampling, abort), result in zip(load, run_load(served, load)):
            want, got = expected(backend, prompt, sampling), result["output_ids"]
            if result["meta_info"]["finish_reason"]["type"] == "abort":
                assert abort is not None
                assert got == want[: len(got)]
            else:
                assert got == want
                check_ended(sampling, result)
        check_all_back(served)
        retracted += served.metrics()["retracted"]
        disabled += served.metrics()["overlap_disabled"]
    assert runner.compiles == compiled
    assert retracted > 0
    assert disabled == 0
