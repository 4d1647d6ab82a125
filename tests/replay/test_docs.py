"""docs/schedule.md shows what the replay prints."""

import io
import re
from pathlib import Path

from helpers_replay import TRACES, host_runner
from rich.console import Console

from jaxoverlap.replay.play import record
from jaxoverlap.replay.scenario import load_scenario
from jaxoverlap.replay.show import show

GUIDE = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text()
LABELS = ("EXTEND ", "DECODE ", "MIXED ", "no batch", "order ", "commits ", "drops ", "puts back ", "why ", "end ")
RIGHT = 56  # column of the right loop in the guide


def plain(text):
    return re.sub(r"\s+", " ", text).strip()


def pages():
    out = io.StringIO()
    for name in sorted(set(re.findall(r"\d\d_\w+(?=\.json)", GUIDE))):
        s = load_scenario(TRACES / f"{name}.json")
        loops = [record(s, overlap, host_runner) for overlap in (False, True)]
        show(Console(file=out, width=400), s, *loops, turns=True, reasons=True)
    return plain(out.getvalue())


def excerpts():
    for block in re.findall(r"^```\n(.*?)^```", GUIDE, re.M | re.S):
        for line in block.splitlines():
            text = re.sub(r"^0[45]  ", "", line)
            halves = [line[:RIGHT], line[RIGHT:]] if line[RIGHT - 2 : RIGHT] == "  " else [text]
            for half in halves:
                shown = plain(half).removesuffix("...").strip()
                if (shown + " ").startswith(LABELS):
                    yield shown


def test_every_line_of_the_guides_excerpts_is_printed():
    printed, lines = pages(), list(excerpts())
    assert len(lines) > 40
    missing = [line for line in lines if line not in printed]
    assert not missing
