"""Regular expressions in growing text. The oracle is `re.search` over the whole text so far."""

import random
import re

import pytest

from jaxoverlap.stop_regex import Scan, StopRegex

ATOMS = [
    "a",
    "b",
    "A",
    "1",
    " ",
    "\n",
    "é",
    "ß",
    "k",
    "İ",
    "[ab]",
    "[^a]",
    "[^\\W1]",
    "[a-c1]",
    ".",
    "\\d",
    "\\w",
    "\\s",
]
ASSERTIONS = ["^", "$", "\\b", "\\B", "\\A", "\\Z"]
REPEATS = ["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}", "{2,}"]
ALPHABET = "abcA1 \n_é世kKſı\0\1"


def random_pattern(rng, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(ATOMS)
    part = random_pattern(rng, depth - 1)
    if kind < 0.45:
        return rng.choice(ASSERTIONS)
    if kind < 0.6:
        return part + random_pattern(rng, depth - 1)
    if kind < 0.7:
        return f"(?:{part}|{random_pattern(rng, depth - 1)})"
    if kind < 0.85:
        return rng.choice(["(%s)", "(?P<name>%s)", "(?i:%s)", "(?s:%s)", "(?-i:%s)"]) % part
    return f"(?:{part}){rng.choice(REPEATS)}"


def random_texts(rng, seeds):
    """(pattern, [text so far, growing])"""
    for _ in range(seeds):
        pattern = rng.choice(["", "", "", "(?i)", "(?m)", "(?s)", "(?im)", "(?a)"]) + random_pattern(rng, 3)
        try:
            re.compile(pattern)
        except re.error:  # a name twice
            continue
        for _ in range(6):
            text = "".join(rng.choices(ALPHABET, k=rng.randrange(12)))
            cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(5)))
            yield pattern, [text[:n] for n in [*cuts, len(text)]]


def test_equals_re_search_and_holds_back_enough():
    hits = 0
    for pattern, texts in random_texts(random.Random(0), 6_000):
        regex, scan = regex_of(pattern), Scan()
        if regex is None:
            continue
        for text in texts:
            begun = regex.begun(scan)
            scan = regex.read(scan, text[scan.position :])
            want = re.search(pattern, text)
            assert (scan.found is None) == (want is None), (pattern, text)
            if want is not None:
                hits += 1
                assert scan.found[0] == want.start(), (pattern, text)
                assert begun <= want.start(), (pattern, texts)
                break
    assert hits > 5_000


def regex_of(pattern):
    """None where it can match the empty string."""
    try:
        return StopRegex(pattern)
    except ValueError as e:
        if "matches the empty string" in str(e):
            return None
        raise


@pytest.mark.parametrize(
    ("pattern", "text", "span"),
    [
        ("\n\n+", "a\n\n\n\nb", (1, 5)),
        ("\n\n+?", "a\n\n\n\nb", (1, 5)),  # the longest, although `re` would take the shortest
        ("bc|abcd", "xabcde", (1, 5)),  # the first, although another ends before it
        ("a|ab", "ab", (0, 2)),
        ("a.*c", "abcbc.", (0, 5)),
    ],
)
def test_the_first_match_then_the_longest(pattern, text, span):
    assert StopRegex(pattern).read(Scan(), text).found == span


@pytest.mark.parametrize(
    ("pattern", "text", "held"),
    [
        ("xyz", "abc", 0),
        ("xyz", "abxy", 2),
        ("xyz", "xyxy", 2),
        ("aab", "aaaa", 2),
        (r"\d+\n", "in 1999", 4),
        (r"\d+\n", "in 1999 ", 0),
        (r"(?s)<think>.*</think>", "so <think>a\nb", 10),
        (r"(?i)stop now", "Sto ST", 2),
        (r"a\B", "ba", 1),
        (r"^a", "ba", 0),
    ],
)
def test_what_more_text_may_complete(pattern, text, held):
    regex = StopRegex(pattern)
    scan = Scan()
    for char in text:
        scan = regex.read(scan, char)
    assert scan.found is None
    assert len(text) - regex.begun(scan) == held


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("(", ["'('", "not a regular expression", "position 0"]),
        ("[", ["not a regular expression"]),
        ("a{5,2}", ["not a regular expression"]),
        ("*", ["not a regular expression"]),
        ("(" * 4000 + "a" + ")" * 4000, ["nested"]),
        ("a{99999999999999999999}", ["repeats too often"]),
        ("a" * 10_001, ["10001 characters", "10000"]),
        ("(?=a)b", ["look-around"]),
        ("(?<!a)b", ["look-around"]),
        (r"(a)\1", ["back reference"]),
        ("(a)?(?(1)b|c)", ["conditional group"]),
        ("(?>a)b", ["atomic group"]),
        ("a++b", ["possessive repeat"]),
        ("a*", ["'a*'", "empty string"]),
        ("^$", ["empty string"]),
        (r"\b", ["empty string"]),
        ("a{501}", ["500 states"]),
        ("(?:a{100}){100}", ["500 states"]),
        (r"a(?:(?:\b){1000}){100000}", ["500 states"]),
    ],
)
def test_refused(pattern, parts):
    with pytest.raises(ValueError, match="stop_regex") as e:
        StopRegex(pattern)
    for part in parts:
        assert part in str(e.value)


def test_repeats_of_nothing_cost_nothing():
    assert StopRegex("a(?:){4000000000}(?:(?:)(?:)){4000000000}b").read(Scan(), "ab").found == (0, 2)


def test_nothing_backtracks():
    """`re` would take longer than the universe has lasted."""
    regex, scan = StopRegex("(?:a+)+b|(?:a|aa|a?)+c"), Scan()
    for _ in range(1000):
        scan = regex.read(scan, "aaaa")
        assert scan.found is None
        assert regex.begun(scan) == 0
    assert regex.read(scan, "c").found == (0, 4001)
