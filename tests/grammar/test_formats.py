"""Formats that are enforced by patterns of our own, against the calendar and Python's parsers."""

import calendar
import datetime
import ipaddress
import itertools
import json
import re

import numpy as np
import pytest

from jaxoverlap.grammar.formats import PATTERNS
from jaxoverlap.grammar.schema import ecma_spaces, read_schema


def matches(name, text):
    return re.search(PATTERNS[name], text) is not None


def test_every_day_of_four_centuries_and_no_other():
    for year in (*range(1896, 2105), 0, 4, 100, 400, 2400, 9999):
        for month, day in itertools.product(range(14), range(33)):
            real = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year or 4, month)[1]
            if real and year == 0:
                real = day <= 29 or month != 2  # year 0 is a leap year
            assert matches("date", f"{year:04}-{month:02}-{day:02}") == real, (year, month, day)


def test_leap_seconds_only_where_it_is_the_end_of_a_day_in_utc():
    for hour, minute, quarters in itertools.product((0, 1, 12, 22, 23), range(0, 60), range(-95, 96)):
        offset = datetime.timedelta(minutes=15 * quarters)
        utc = datetime.datetime(2000, 6, 15, hour, minute) - offset
        hours, minutes = divmod(abs(quarters) * 15, 60)
        text = f"{hour:02}:{minute:02}:60{'-' if quarters < 0 else '+'}{hours:02}:{minutes:02}"
        assert matches("time", text) == ((utc.hour, utc.minute) == (23, 59)), text
    assert matches("date-time", "1998-12-31T23:59:60Z")
    assert not matches("date-time", "1998-12-31T22:59:60Z")


def test_ipv6_as_python_reads_it():
    rng = np.random.default_rng(0)
    parts = ["0", "1", "abcd", "FFFF", "12345", "", "g", "1.2.3.4", "1.2.3.256"]
    seen = {True: 0, False: 0}
    for _ in range(30_000):
        text = ":".join(
            rng.choice(parts, int(rng.integers(1, 9)), p=[0.3, 0.2, 0.1, 0.1, 0.01, 0.22, 0.01, 0.05, 0.01])
        )
        try:
            ipaddress.IPv6Address(text)
            valid = True
        except ValueError:
            valid = False
        assert matches("ipv6", text) == valid, text
        seen[valid] += 1
    assert min(seen.values()) > 1000


def test_formats_become_patterns_only_where_they_are_keywords():
    assert read_schema('{"format": "date"}') == {"pattern": PATTERNS["date"]}
    both = read_schema('{"format": "ipv6", "pattern": "^a", "allOf": [{"minLength": 3}]}')
    assert both == {"pattern": "^a", "allOf": [{"minLength": 3}, {"pattern": PATTERNS["ipv6"]}]}
    for kept in ('{"properties": {"format": {"const": {"format": "date"}}}}', '{"enum": [{"format": "date"}]}'):
        assert read_schema(kept) == json.loads(kept)
    assert read_schema('{"$defs": {"x": {"items": {"format": "time"}}}}') == {
        "$defs": {"x": {"items": {"pattern": PATTERNS["time"]}}}
    }


@pytest.mark.parametrize(
    ("pattern", "takes", "refuses"),
    [
        (r"^\s$", " \t\n\u00a0\ufeff", "a_"),
        (r"^\S$", "a_", " \ufeff"),
        (r"^[\s_]$", " _\ufeff", "a"),
        (r"^[^\s_]$", "a", " _\ufeff"),
        (r"^\\s$", [r"\s"], " "),
        (r"^[\]\s]$", "] \ufeff", "["),
    ],
)
def test_spaces_are_those_of_ecma_262(pattern, takes, refuses):
    for text in takes:
        assert re.search(ecma_spaces(pattern), text), text
    for text in refuses:
        assert not re.search(ecma_spaces(pattern), text), text
