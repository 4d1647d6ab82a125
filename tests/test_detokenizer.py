import itertools
import json
import re
from pathlib import Path

import pytest
from helpers_engine import byte_fallback_tokenizer, byte_level_tokenizer, host_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxoverlap.core import FinishReason
from jaxoverlap.detokenizer import Detokenizer, held_back
from jaxoverlap.growing_text import REPLACEMENT, byte_tokens
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.tokenizer import Tokenizer

BYTES = byte_level_tokenizer()
FALLBACK = byte_fallback_tokenizer()
LENGTH = FinishReason("length", length=1)
END = 256


def make(tokenizer, **params):
    return Detokenizer(tokenizer, SamplingParams(**params), byte_tokens(tokenizer.backend.token_to_id))


def deltas(tokenizer, ids, cuts, reason=LENGTH, **params):
    """The pieces of text for `ids` that arrive in runs that end at `cuts`, the last one with the end."""
    d = make(tokenizer, **params)
    edges = [0, *cuts, len(ids)]
    runs = [list(ids[a:b]) for a, b in itertools.pairwise(edges)]
    out = []
    for run in runs[:-1]:
        out.append(d.add(run))
        assert d.text == "".join(out)
    out.append(d.finish(runs[-1], reason))
    assert d.text == "".join(out)
    return out


@st.composite
def runs_of(draw, ids):
    chosen = draw(st.lists(ids, max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(chosen)), max_size=24)))
    return chosen, cuts


@settings(max_examples=300, deadline=None)
@given(runs_of(st.one_of(st.sampled_from([*"aé世🙂".encode(), END]), st.integers(0, END))), st.booleans())
def test_byte_level_deltas_join_to_the_whole_text(run, skip):
    ids, cuts = run
    pieces = deltas(BYTES, ids, cuts, skip_special_tokens=skip)
    whole = bytes(i for i in ids if i < END).decode(errors="replace") if skip else None
    assert "".join(pieces) == BYTES.decode(ids, skip)
    if whole is not None:
        assert "".join(pieces) == whole


@settings(max_examples=300, deadline=None)
@given(runs_of(st.one_of(st.sampled_from(list("世🙂".encode())), st.integers(250, 263))))
def test_byte_fallback_deltas_join_to_the_whole_text(run):
    ids, cuts = run
    assert "".join(deltas(FALLBACK, ids, cuts)) == FALLBACK.decode(ids)


def test_a_special_token_that_is_skipped_ends_no_run_of_bytes():
    start = FALLBACK.backend.token_to_id("<s>")
    ids = [*"世".encode(), start, 0xE4]
    assert deltas(FALLBACK, ids, [3, 4]) == ["", "", REPLACEMENT * 4]
    assert deltas(FALLBACK, ids, [3, 4], skip_special_tokens=False) == ["", "世<s>", REPLACEMENT]


def test_a_broken_character_inside_is_shown_when_it_is_known_to_be_broken():
    ids = [*b"a", 0xE4, *b"b", 0xE4, 0xB8]
    assert deltas(BYTES, ids, [1, 2, 3, 4, 5]) == ["a", "", REPLACEMENT + "b", "", "", REPLACEMENT]


def test_no_replacement_character_before_a_character_is_whole():
    ids = list("삼겹살🙂".encode())
    for size in (1, 2, 3):
        pieces = deltas(BYTES, ids, range(size, len(ids), size))
        assert "".join(pieces) == "삼겹살🙂"
        assert all(REPLACEMENT not in piece for piece in pieces)


def test_skipped_special_tokens_give_no_text():
    assert deltas(BYTES, [*b"hi", END], [1, 2]) == ["h", "i", ""]
    assert "".join(deltas(BYTES, [*b"hi", END], [1, 2], skip_special_tokens=False)) == "hi<|end|>"


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("abc", ("xyz",), 0),
        ("abx", ("xyz",), 1),
        ("abxy", ("xyz",), 2),
        ("abxy", ("xyz", "bxyq"), 3),
        ("aaa", ("aaab",), 3),
        ("xyz", ("xyz",), 0),  # a whole stop is the scheduler's business
        ("", ("a",), 0),
        ("abc", (), 0),
    ],
)
def test_held_back(text, stops, held):
    assert held_back(text, stops) == held


def test_text_that_may_begin_a_stop_waits():
    ids = list(b"one fix two")
    pieces = deltas(BYTES, ids, range(1, len(ids)), stop=" fib")
    assert pieces == ["o", "n", "e", "", "", "", " fix", "", " t", "w", "o"]  # " fi" may be the stop


@pytest.mark.parametrize(("no_stop_trim", "want"), [(False, "one"), (True, "one fib")])
def test_text_ends_at_the_stop_string(no_stop_trim, want):
    ids = list(b"one fib")
    reason = FinishReason("stop", matched=" fib")
    for cuts in ([], [3], range(1, len(ids))):
        pieces = deltas(BYTES, ids, cuts, reason, stop=" fib", no_stop_trim=no_stop_trim)
        assert "".join(pieces) == want


@pytest.mark.parametrize(("no_stop_trim", "want"), [(False, "in "), (True, "in 1999!")])
def test_text_ends_at_the_regex(no_stop_trim, want):
    ids = list(b"in 1999!")
    reason = FinishReason("stop", matched=r"\d+!")
    for cuts in ([], [4], range(1, len(ids))):
        pieces = deltas(BYTES, ids, cuts, reason, stop_regex=r"\d+!", no_stop_trim=no_stop_trim)
        assert "".join(pieces) == want


def test_text_that_may_begin_a_match_waits():
    ids = list(b"in 1999, 5!")
    pieces = deltas(BYTES, ids[:-1], range(1, len(ids)), stop_regex=[r"\d+!", "n q"])
    assert pieces == ["i", "", "", "n ", "", "", "", "1999,", " ", "", "5"]  # "n " may go on to "n q"
    pieces = deltas(BYTES, ids[:-1], range(1, len(ids)), stop_regex=r"\d+!", no_stop_trim=True)
    assert pieces == [*"in 1999, 5", ""]  # nothing that was shown would be cut


@settings(max_examples=200, deadline=None)
@given(
    runs_of(st.sampled_from([*"ab 世".encode(), END])), st.sampled_from(["a+b", "b|ab ", "世+.", "(?s)a.*世", "[^a]b"])
)
def test_what_is_shown_of_a_regex_does_not_depend_on_the_pieces(run, pattern):
    """The ids end where the text first matches, as the scheduler ends them."""
    ids, cuts = run
    whole = [bytes(i for i in ids[:n] if i < END).decode(errors="replace") for n in range(len(ids) + 1)]
    end = next((n for n in range(len(ids) + 1) if re.search(pattern, whole[n])), None)
    if end is None or END in ids:  # skipped special tokens are text to the scheduler
        assert "".join(deltas(BYTES, ids, cuts, stop_regex=pattern)) == whole[-1]
        return
    reason = FinishReason("stop", matched=pattern)
    shown = "".join(deltas(BYTES, ids[:end], [c for c in cuts if c < end], reason, stop_regex=pattern))
    assert shown == whole[end][: re.search(pattern, whole[end]).start()]


def test_the_same_text_before_the_stop_is_not_cut_off():
    """A special token stood between its characters; it was no stop to the scheduler."""
    ids = [*b"x", END, *b"y xy"]
    for cuts in ([], range(1, len(ids))):
        assert "".join(deltas(BYTES, ids, cuts, FinishReason("stop", matched="xy"), stop="xy")) == "xy "
        assert "".join(deltas(BYTES, ids, cuts, FinishReason("stop", matched="x[y]"), stop_regex="x[y]")) == "xy "


def test_text_behind_a_stop_string_in_the_same_token_is_not_shown():
    vocabulary = {"ab": 0, "cdxx": 1}

    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return "".join({v: k for k, v in vocabulary.items()}[i] for i in ids)

    d = Detokenizer(Words(), SamplingParams(stop="bcd"))
    assert d.add([0]) == "a"
    assert d.finish([1], FinishReason("stop", matched="bcd")) == ""
    d = Detokenizer(Words(), SamplingParams(stop="bcd", no_stop_trim=True))
    assert d.add([0]) + d.finish([1], FinishReason("stop", matched="bcd")) == "abcd"


@pytest.mark.parametrize(("no_stop_trim", "want"), [(False, "a"), (True, "ab")])
def test_a_matched_stop_token_is_left_out(no_stop_trim, want):
    reason = FinishReason("stop", matched=ord("b"))
    assert "".join(deltas(BYTES, list(b"ab"), [1], reason, no_stop_trim=no_stop_trim)) == want


def test_byte_ids():
    assert byte_tokens(FALLBACK.backend.token_to_id) == frozenset(range(256))
    assert byte_tokens(BYTES.backend.token_to_id) == frozenset()


# tests/README.md H20 and H6 with the demo model's tokenizer, through an engine over a scripted device


@pytest.fixture(scope="module")
def smollm2(demo_model):
    return Tokenizer.from_dir(demo_model)


def scripted(smollm2, ids, interval=1, prompt=(5, 6, 7), **params):
    """(streamed results, the final one) of a request whose output is `ids`, in pieces of `interval` tokens."""
    settings = {"max_new_tokens": len(ids), "ignore_eos": True, "stream_interval": interval, **params}
    with host_engine(tokenizer=smollm2, scripts={"r": ids}, vocab_size=49152) as engine:
        results = list(engine.generate(input_ids=list(prompt), sampling_params=settings, rid="r", stream=True))
        again = engine.generate(input_ids=list(prompt), sampling_params=settings, rid="r")
    for key in ("text", "output_ids"):
        assert results[-1][key] == again[key]
    return results, again


def texts(results):
    """Each result's new text; fails where a result takes something back."""
    out, before = [], ""
    for r in results:
        assert r["text"].startswith(before)
        out.append(r["text"][len(before) :])
        before = r["text"]
    return out


@pytest.mark.demo
@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([49, 216, 7906, 240, 369], "A 世ab"),
        ([183, 220, 137, 181, 127, 134, 183, 220, 129], "삼겹살"),
        ([10813, 38887, 10907], "🙂 ok"),
        ([49, 216, 7906], None),  # ends inside a character
        ([183, 220], None),
    ],
)
def test_h20_utf8_stream(smollm2, ids, text, interval):
    want = smollm2.decode(ids)
    assert text is None or want == text
    assert text is not None or want.endswith(REPLACEMENT)
    for prompt in ((5, 6, 7), (5, 7906)):  # the second ends inside a character
        pieces = texts(scripted(smollm2, ids, interval, prompt)[0])
        assert "".join(pieces) == want
        assert all(REPLACEMENT not in piece for piece in pieces[:-1])


FIBONACCI = [3725, 5367, 198, 1604, 3987, 46477, 24]


@pytest.mark.demo
@pytest.mark.parametrize("no_stop_trim", [False, True])
@pytest.mark.parametrize("stop", [" fib", "ibon", "nacci(n"])
def test_h6_stop_string(smollm2, stop, no_stop_trim):
    golden = fibonacci()
    whole = smollm2.decode(golden)
    at = whole.index(stop)
    # the token that completes the stop, found on its own: the shortest beginning whose text holds it
    count = next(n for n in range(1, len(golden)) if stop in smollm2.decode(golden[:n]))
    results, final = scripted(smollm2, golden, stop=[stop, "never seen"], no_stop_trim=no_stop_trim)
    assert final["text"] == (whole[: at + len(stop)] if no_stop_trim else whole[:at])
    assert "".join(texts(results)) == final["text"]
    assert final["output_ids"] == golden[:count]
    assert final["meta_info"]["completion_tokens"] == count
    assert final["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.demo
@pytest.mark.parametrize("no_stop_trim", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("pattern", [" f.b", "i[a-z]on", r"n\w+\(n", r"\n +if\b"])
def test_h6_stop_regex(smollm2, pattern, interval, no_stop_trim):
    golden = fibonacci()
    whole = smollm2.decode(golden)
    span = re.search(pattern, whole).span()
    count = next(n for n in range(1, len(golden)) if re.search(pattern, smollm2.decode(golden[:n])))
    results, final = scripted(smollm2, golden, interval, stop_regex=["never seen", pattern], no_stop_trim=no_stop_trim)
    assert final["text"] == whole[: span[no_stop_trim]]
    assert "".join(texts(results)) == final["text"]
    assert final["output_ids"] == golden[:count]
    assert final["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}


def fibonacci():
    cases = json.loads((Path(__file__).parent / "data" / "smollm2_goldens.json").read_text())["cases"]
    return next(c["output_ids"] for c in cases if c["output_ids"][: len(FIBONACCI)] == FIBONACCI)


@pytest.mark.demo
def test_h6_in_a_batch_with_a_prefill(smollm2):
    """The stop is found in the same place while another request's prompt joins the batches."""
    golden = fibonacci()
    whole = smollm2.decode(golden)
    params = [{"max_new_tokens": len(golden), "ignore_eos": True, "stop": "ibon"}, {"max_new_tokens": 4}]
    settings = {"chunked_prefill_size": 8, "enable_mixed_chunk": True}
    with host_engine(tokenizer=smollm2, scripts={"r": golden}, vocab_size=49152, **settings) as engine:
        stream = engine.generate(input_ids=[5], sampling_params=params[0], rid="r", stream=True)
        got = [next(stream)]
        other = engine.generate(input_ids=list(range(40)), sampling_params=params[1], stream=True)
        got += list(stream)
        assert len(list(other)) == 4
    assert "".join(texts(got)) == whole[: whole.index("ibon")]
