"""When a request ends, for every way of cutting its outputs into steps (tests/README.md H5, H6).

A scripted device commits given tokens in runs of given lengths, as accepted runs of speculation do.
"""

import re
from itertools import accumulate, product

import numpy as np
import pytest
from harness import EOS, Harness

from jaxoverlap.core import ForwardMode, StepResult

DRAFTS = 8


class Scripted:
    """Gives each request the tokens of its script: one for a prefill, then runs of the lengths of `cuts`."""

    def __init__(self, scripts, cuts):
        self.scripts, self.cuts = scripts, {rid: list(c) for rid, c in cuts.items()}
        self.done = dict.fromkeys(scripts, 0)

    def launch(self, launches):
        return [self.verify(x) if x.mode is ForwardMode.DECODE else self.prefill(x) for x in launches]

    def prefill(self, x):
        tokens = []
        for r, n in zip(x.requests, x.seq_lens):
            whole = n == r.prompt_len
            tokens.append(self.take(r.rid, 1)[0] if whole else 999)
        return StepResult(np.array(tokens, np.int32))

    def verify(self, x):
        tokens, lens = np.full((len(x.requests), DRAFTS), 999, np.int32), []
        for i, r in enumerate(x.requests):
            run = self.take(r.rid, self.cuts[r.rid].pop(0) if self.cuts[r.rid] else 1)
            tokens[i, : len(run)] = run
            lens.append(len(run))
        lens_in = np.zeros(len(x.requests), np.int32)
        return StepResult(tokens, np.array(lens, np.int32), seq_lens_in=lens_in, bonus_in=lens_in)

    def take(self, rid, n):
        start = self.done[rid]
        self.done[rid] = start + n
        script = [*self.scripts[rid], *[998] * 20]
        return script[start : start + n]

    def wait(self, handle):
        return handle


def run(scripts, cuts, overlap, text=None, prompts=None, caps=None, stop=None, stop_regex=None, **config):
    """Each request's (finish type, matched, tokens shown)."""
    h = Harness(
        disable_overlap_schedule=not overlap,
        speculative_num_steps=DRAFTS - 1,
        speculative_num_draft_tokens=DRAFTS,
        speculative_algorithm="EAGLE",
        max_total_tokens=1024,
        audit=True,
        **config,
    )
    h.runner = Scripted(scripts, cuts)
    if text is not None:
        h.scheduler.decode = text
    for i, rid in enumerate(scripts):
        prompt = (prompts or {}).get(rid, [100 + i, 101, 102])
        h.submit(rid, prompt, (caps or {}).get(rid, 10), stop=stop, stop_regex=stop_regex)
    h.run()
    for rid in scripts:
        assert h.streamed[rid] == h.outputs(rid)
    return {rid: (r.finish_reason.type, r.finish_reason.matched, h.outputs(rid)) for rid, r in h.requests.items()}


# H5: 8 tokens are out, the cap is 10, and one run brings a stop as well as the cap

X, Y, STOP = 50, 51, 77
BEFORE = list(range(40, 48))
RUNS = {"eos x y": [EOS, X, Y], "x y eos": [X, Y, EOS], "x eos": [X, EOS], "x stop y": [X, STOP, Y]}


def compositions(n):
    """Every way of writing n as a sum of ordered parts."""
    for bits in product([False, True], repeat=n - 1):
        ends = [i + 1 for i, cut in enumerate(bits) if cut] + [n]
        yield [b - a for a, b in zip([0, *ends], ends)]


CASES = [(name, cut) for name, tokens in RUNS.items() for cut in compositions(len(tokens))]


def finish_h5(tokens, cut, overlap, order, kind):
    got = run({"a": BEFORE + tokens}, {"a": [7, *cut]}, overlap, finish_order=order, **{kind: f"<{STOP}>"})["a"]
    return got[0], len(got[2]), got[2]


def first_stop(tokens):
    return next((len(BEFORE) + i + 1 for i, t in enumerate(tokens) if t in (EOS, STOP)), 99)


KINDS = pytest.mark.parametrize("stops", ["stop", "stop_regex"])


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "cut"), CASES)
def test_h5_stop_first_is_the_same_for_every_cut(name, cut, overlap, stops):
    want = {"eos x y": ("stop", 9), "x y eos": ("length", 10), "x eos": ("stop", 10), "x stop y": ("stop", 10)}[name]
    kind, shown, ids = finish_h5(RUNS[name], cut, overlap, "stop-first", stops)
    assert (kind, shown) == want
    assert ids == (BEFORE + RUNS[name])[:shown]


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "cut"), CASES)
def test_h5_sglang_calls_a_step_that_reaches_the_cap_length(name, cut, overlap, stops):
    """The first step that ends at or past the cap, or holds a stop, decides; nothing behind a stop is shown."""
    stop = first_stop(RUNS[name])
    ends = accumulate(cut, initial=len(BEFORE))
    end = next(n for n in ends if n >= 10 or n >= stop)
    kind, shown, ids = finish_h5(RUNS[name], cut, overlap, "sglang", stops)
    assert kind == ("length" if end >= 10 else "stop")
    assert shown == min(10, stop)
    assert ids == (BEFORE + RUNS[name])[:shown]


# H6: a stop string in the middle of a run

PIECES = ["def", " fib", "on", "acci", "(", "n", "):", "\n   ", " if", " n", " <=", " 1", ":", " return", " n"]
TEXT = {300 + i: piece for i, piece in enumerate(PIECES)}
SCRIPT = list(TEXT)


def piece_text(ids):
    return "".join(TEXT.get(int(t), f"<{t}>") for t in ids)


def ends_at(stop):
    """Tokens until the text holds the stop, by trying them all."""
    return next(n for n in range(1, len(SCRIPT) + 1) if stop in piece_text(SCRIPT[:n]))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", range(1, DRAFTS + 1))
@pytest.mark.parametrize(("stop", "tokens"), [(" fib", 2), ("ibon", 3), ("nacci(n", 6), ("return n", 15), ("def", 1)])
def test_h6_a_stop_string_ends_the_request_at_the_token_that_completes_it(stop, tokens, length, overlap):
    """Beside it a request without that text runs on, and one whose prompt takes four chunks comes in."""
    assert ends_at(stop) == tokens
    check_h6(SCRIPT[:tokens], length, overlap, stop=stop)


REGEXES = [
    r"f[a-z]b",
    r"(?i)FIBON",
    r"n\w*ci\(n",
    r"\bif\b",
    r"return\s+\S",
    r"\d+:",
    r"[^a-z0-9 <>]",
    r"i.*\)",
    r"^d",
    "ef$",
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", range(1, DRAFTS + 1))
@pytest.mark.parametrize("pattern", REGEXES)
def test_h6_a_regex_ends_the_request_at_the_token_that_completes_it(pattern, length, overlap):
    search = re.compile(pattern).search
    tokens = next(n for n in range(1, len(SCRIPT) + 1) if search(piece_text(SCRIPT[:n])))
    check_h6(SCRIPT[:tokens], length, overlap, stop_regex=pattern)


def check_h6(want, length, overlap, **stops):
    """`want`: the tokens that the request with the script's text shows."""
    plain = [600 + i for i in range(20)]
    got = run(
        {"a": SCRIPT, "b": plain, "long": plain[:6]},
        {"a": [length] * 20, "b": [1 + length % 3] * 20, "long": [length] * 20},
        overlap,
        text=piece_text,
        prompts={"long": list(range(700, 730))},
        caps={"a": 40, "b": 20, "long": 6},
        chunked_prefill_size=8,
        **stops,
    )
    assert got["a"] == ("stop", *stops.values(), want)
    assert got["b"] == ("length", None, plain)
    assert got["long"] == ("length", None, plain[:6])


@pytest.mark.parametrize("overlap", [False, True])
def test_of_several_stop_strings_the_one_completed_first_counts(overlap):
    got = run({"a": SCRIPT}, {"a": [8, 8]}, overlap, text=piece_text, stop=["(n", "acci", "zzz"], caps={"a": 40})
    assert got["a"] == ("stop", "acci", SCRIPT[:4])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_id_before_a_stop_string_in_one_run_wins(overlap):
    script = [301, EOS, 302, 303, 304]
    got = run({"a": script}, {"a": [4]}, overlap, text=piece_text, stop="onacci", caps={"a": 40})
    assert got["a"] == ("stop", EOS, script[:2])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("stop", "regexes", "matched"),
    [
        ("acci", ["a.ci"], "acci"),
        (None, ["zzz", "a.ci", "acc"], "a.ci"),
        ("):", ["a.ci"], "a.ci"),
        ("acci", ["f.b"], "f.b"),
    ],
)
def test_at_one_token_a_string_comes_before_a_regex_and_regexes_in_the_order_given(stop, regexes, matched, overlap):
    got = run({"a": SCRIPT}, {"a": [8, 8]}, overlap, text=piece_text, stop=stop, stop_regex=regexes, caps={"a": 40})
    assert got["a"][:2] == ("stop", matched)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_regex_comes_before_a_stop_id_at_the_same_token(overlap):
    got = run({"a": [301, EOS, 302]}, {"a": [3]}, overlap, text=piece_text, stop_regex=f"<{EOS}>")
    assert got["a"] == ("stop", f"<{EOS}>", [301, EOS])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_regex_is_found_after_a_retraction(overlap):
    """The text read before it is not read again."""
    h = Harness(
        max_total_tokens=80,
        init_new_token_ratio=0.05,
        retract_decode_steps=2,
        disable_overlap_schedule=not overlap,
        scripts={f"r{i}": dict(enumerate(range(300, 330))) for i in range(4)},
    )
    for i in range(4):
        prompt = list(range(100 + 10 * i, 108 + 10 * i))
        h.submit(f"r{i}", prompt, max_new_tokens=24, ignore_eos=True, stop_regex=r"<303>.*<32[01]>")
    h.run()
    assert h.scheduler.counters.retracted > 0
    for rid, r in h.requests.items():
        assert h.outputs(rid) == list(range(300, 321)), rid
        assert r.finish_reason.matched == r"<303>.*<32[01]>"


# the order of checks, one token a step


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("script", "cap", "order", "want"),
    [
        ({3: EOS}, 8, "sglang", ("stop", EOS, 4)),
        ({3: EOS}, 4, "sglang", ("length", None, 4)),
        ({3: EOS}, 4, "stop-first", ("stop", EOS, 4)),
        ({0: EOS}, 8, "sglang", ("stop", EOS, 1)),
        ({0: EOS}, 1, "sglang", ("length", None, 1)),
        ({2: STOP}, 8, "sglang", ("stop", f"<{STOP}>", 3)),
        ({2: 9, 3: EOS}, 8, "sglang", ("stop", 9, 3)),
        ({}, 5, "stop-first", ("length", None, 5)),
    ],
)
def test_one_token_a_step(script, cap, order, want, overlap):
    h = Harness(disable_overlap_schedule=not overlap, finish_order=order, scripts={"a": script})
    r = h.submit("a", [100, 101, 102], cap, stop=f"<{STOP}>", stop_token_ids=[9])
    h.run()
    assert (r.finish_reason.type, r.finish_reason.matched, len(h.outputs("a"))) == want
    if want[0] == "length":
        assert r.finish_reason.length == cap


@pytest.mark.parametrize("overlap", [False, True])
def test_ignore_eos_ignores_stop_ids_but_not_stop_strings(overlap):
    h = Harness(disable_overlap_schedule=not overlap, scripts={"a": {1: EOS, 2: 9, 5: STOP}})
    r = h.submit("a", [100, 101], 20, stop=f"<{STOP}>", stop_token_ids=[9], ignore_eos=True)
    h.run()
    assert (r.finish_reason.matched, len(h.outputs("a"))) == (f"<{STOP}>", 6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("token", [-1, 1000])
def test_a_token_outside_the_vocabulary_ends_the_request_with_an_error(token, overlap):
    drafts = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 7, "speculative_num_draft_tokens": 8}
    h = Harness(disable_overlap_schedule=not overlap, **drafts)
    h.runner = Scripted({"a": [50, 51, token, 52]}, {"a": [1, 1, 1]})
    r = h.submit("a", [100, 101], 20)
    h.run()
    assert (r.finish_reason.type, r.finish_reason.status_code) == ("abort", 500)
    assert f"token {token} is outside the vocabulary of 1000" in r.finish_reason.message
    assert h.outputs("a") == [50, 51]
