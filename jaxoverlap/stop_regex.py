"""Regular expressions that end a request: searched while the text grows, in time linear in the text. Imports no jax.

What counts as a match is Python's `re.search` over the whole text so far (SGLang's stop_regex), but nothing backtracks:
all ways in which a match may go on are followed at once, one state each. So no expression can hold up the loop, text is
read once, and it is known from which character on it may belong to a match that is not complete yet. The price: what is
not a regular language (look-around, back references, atomic groups) is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from re import _parser  # type: ignore[attr-defined]  # as SGLang: the standard library's own parser
from typing import Any, NamedTuple

MOST_CHARACTERS = 10_000
MOST_STATES = 500  # the most that are looked at for a character: some 0.2 ms
ACCEPT = -1
UNSUPPORTED = {
    _parser.ASSERT: "look-around",
    _parser.ASSERT_NOT: "look-around",
    _parser.GROUPREF: "a back reference",
    _parser.GROUPREF_EXISTS: "a conditional group",
    _parser.ATOMIC_GROUP: "an atomic group",
    _parser.POSSESSIVE_REPEAT: "a possessive repeat",
}
CATEGORIES = {
    _parser.CATEGORY_DIGIT: r"\d",
    _parser.CATEGORY_NOT_DIGIT: r"\D",
    _parser.CATEGORY_SPACE: r"\s",
    _parser.CATEGORY_NOT_SPACE: r"\S",
    _parser.CATEGORY_WORD: r"\w",
    _parser.CATEGORY_NOT_WORD: r"\W",
}


@dataclass(frozen=True, slots=True)
class Scan:
    """How far a text has been read. Positions count its characters from 0."""

    position: int = 0
    previous: str | None = None  # the last character
    ways: dict[int, int] = field(default_factory=dict)  # state: first position from which a match may have come to it
    found: tuple[int, int] | None = None  # the first, then longest, match with an end in what was read last


class StopRegex:
    """`pattern` as `re` has it. Raises ValueError naming what is wrong with it."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        start = pattern if len(pattern) <= 40 else f"{pattern[:40]}..."
        if len(pattern) > MOST_CHARACTERS:
            raise ValueError(f"stop_regex {start!r} has {len(pattern)} characters, more than {MOST_CHARACTERS}")
        try:
            tree = _parser.parse(pattern)
            if tree.getwidth()[0] == 0:
                raise ValueError(f"stop_regex {start!r} matches the empty string: every request would end at once")
            builder = Builder()
            self._start = builder.sequence(tree, tree.state.flags, ACCEPT)
        except re.error as e:
            raise ValueError(f"stop_regex {start!r} is not a regular expression: {e}") from None
        except Unsupported as e:
            raise ValueError(f"stop_regex {start!r} {e}") from None
        except (RecursionError, OverflowError):
            raise ValueError(f"stop_regex {start!r} is nested too deeply or repeats too often") from None
        self._states = builder.states
        self._assertions = {s.assertion for s in self._states if s.assertion is not None}

    def read(self, scan: Scan, text: str) -> Scan:
        """`scan` after more text. `found` takes the text to end here; what is read later may show that it does not."""
        ways, previous, found = scan.ways, scan.previous, None
        for at, char in enumerate(text, scan.position):
            before = ways
            ways, found = self._step(before, at, previous, char, found)
            if char == "\n" and at == scan.position + len(text) - 1 and "$" in self._assertions:
                # only while it is the last character may `$` stand before it
                last, found = self._step(before, at, previous, char, found, is_last=True)
                found = self._end(last, at + 1, char, found)
            previous = char
        position = scan.position + len(text)
        return Scan(position, previous, ways, self._end(ways, position, previous, found))

    def begun(self, scan: Scan) -> int:
        """Where the earliest match begins that more text may complete; `scan.position` if there is none."""
        going = (begin for state, begin in scan.ways.items() if state != ACCEPT)
        return min(going, default=scan.position)

    def _step(
        self,
        ways: dict[int, int],
        at: int,
        previous: str | None,
        char: str,
        found: tuple[int, int] | None,
        is_last: bool = False,
    ) -> tuple[dict[int, int], tuple[int, int] | None]:
        """The ways behind `char`, which stands at `at`; and the better of `found` and a match up to it."""
        live = self._live(ways, at, self._holding(previous, char, is_last))
        if ACCEPT in live:
            found = better(found, (live[ACCEPT], at))
        behind: dict[int, int] = {}
        for state, begin in live.items():
            if state != ACCEPT and self._states[state].takes(char):
                target = self._states[state].targets[0]
                behind[target] = min(begin, behind.get(target, begin))
        return behind, found

    def _end(
        self, ways: dict[int, int], at: int, previous: str | None, found: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        live = self._live(ways, at, self._holding(previous, None, True))
        return better(found, (live[ACCEPT], at)) if ACCEPT in live else found

    def _live(self, ways: dict[int, int], at: int, holding: frozenset[str]) -> dict[int, int]:
        """The states that take a character, or ACCEPT, that `ways` and a match that begins here lead to."""
        live: dict[int, int] = {}
        seen: set[int] = set()
        for state, begin in sorted({self._start: at, **ways}.items(), key=itemgetter(1)):
            todo = [state]  # a state is first come to from the earliest beginning
            while todo:
                here = todo.pop()
                if here in seen:
                    continue
                seen.add(here)
                if here == ACCEPT or self._states[here].takes is not takes_nothing:
                    live[here] = begin
                elif self._states[here].assertion in (None, *holding):
                    todo += self._states[here].targets
        return live

    def _holding(self, previous: str | None, following: str | None, is_last: bool) -> frozenset[str]:
        """Those of the assertions that hold between two characters; None is an end of the text."""
        if not self._assertions:
            return frozenset()
        word, ascii_word = is_word(previous) != is_word(following), is_ascii_word(previous) != is_ascii_word(following)
        holds = {
            "\\A": previous is None,
            "^": previous in (None, "\n"),
            "\\Z": following is None,
            "$": following is None or (is_last and following == "\n"),
            "$ of a line": following in (None, "\n"),
            "\\b": word,
            "\\B": not word,
            "\\b of ASCII": ascii_word,
            "\\B of ASCII": not ascii_word,
        }
        return frozenset(a for a in self._assertions if holds[a])


@functools.lru_cache(maxsize=256)
def compile_stop_regex(pattern: str) -> StopRegex:
    """Raises ValueError naming what is wrong with it."""
    return StopRegex(pattern)


class Unsupported(Exception):
    """What a pattern uses or needs."""


class State(NamedTuple):
    """Takes a character and goes to its one target; or takes none and goes, if `assertion` holds, to any of them."""

    takes: Callable[[str], Any]
    targets: list[int]
    assertion: str | None = None


class Builder:
    """States of a parsed pattern, from its end to its beginning: each part is told where to go on."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.visits = 0  # repeats of what needs no state must not go on for ever either

    def sequence(self, items: Any, flags: int, then: int) -> int:
        """Returns the state in which to begin."""
        for op, value in reversed(list(items)):
            self.visits += 1
            if max(self.visits, len(self.states)) > MOST_STATES:
                raise Unsupported(f"needs more than {MOST_STATES} states")
            then = self.part(op, value, flags, then)
        return then

    def part(self, op: Any, value: Any, flags: int, then: int) -> int:
        if op in (_parser.LITERAL, _parser.NOT_LITERAL, _parser.IN, _parser.ANY):
            return self.add(State(self.taker(op, value, flags), [then]))
        if op is _parser.AT:
            return self.add(State(takes_nothing, [then], assertion(value, flags)))
        if op is _parser.SUBPATTERN:
            _, on, off, items = value
            return self.sequence(items, (flags | on) & ~off, then)
        if op is _parser.BRANCH:
            return self.add(State(takes_nothing, [self.sequence(items, flags, then) for items in value[1]]))
        if op in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            least, most, items = value
            return self.repeat(least, most, items, flags, then)
        raise Unsupported(f"uses {UNSUPPORTED.get(op, str(op).lower())}, which is not supported")

    def repeat(self, least: int, most: int, items: Any, flags: int, then: int) -> int:
        if not len(items):
            return then
        if most == _parser.MAXREPEAT:
            again = self.add(State(takes_nothing, [then]))
            self.states[again].targets.append(self.sequence(items, flags, again))
            then = again
        else:
            out = then
            for _ in range(most - least):
                then = self.add(State(takes_nothing, [self.sequence(items, flags, then), out]))
        for _ in range(least):
            then = self.sequence(items, flags, then)
        return then

    def add(self, state: State) -> int:
        self.states.append(state)
        return len(self.states) - 1

    def taker(self, op: Any, value: Any, flags: int) -> Callable[[str], Any]:
        """Whether a character fits, as `re` itself says: sets, classes and letter case are its own."""
        if op is _parser.LITERAL and not flags & re.IGNORECASE:
            return chr(value).__eq__
        return re.compile(source(op, value), flags & (re.IGNORECASE | re.DOTALL | re.ASCII)).match


def source(op: Any, value: Any) -> str:
    """The expression of one character, written out again."""
    if op is _parser.ANY:
        return "."
    if op is _parser.NEGATE:
        return "^"
    if op is _parser.IN:
        return f"[{''.join(source(*item) for item in value)}]"
    if op is _parser.CATEGORY:
        return CATEGORIES[value]
    if op is _parser.RANGE:
        return "-".join(re.escape(chr(end)) for end in value)
    char = re.escape(chr(value))
    return f"[^{char}]" if op is _parser.NOT_LITERAL else char


def takes_nothing(char: str) -> bool:
    return False


def assertion(code: Any, flags: int) -> str:
    lines, ascii_only = flags & re.MULTILINE, flags & re.ASCII
    return {
        _parser.AT_BEGINNING: "^" if lines else "\\A",
        _parser.AT_BEGINNING_STRING: "\\A",
        _parser.AT_END: "$ of a line" if lines else "$",
        _parser.AT_END_STRING: "\\Z",
        _parser.AT_BOUNDARY: "\\b of ASCII" if ascii_only else "\\b",
        _parser.AT_NON_BOUNDARY: "\\B of ASCII" if ascii_only else "\\B",
    }[code]


def better(one: tuple[int, int] | None, other: tuple[int, int]) -> tuple[int, int]:
    return other if one is None else min(one, other, key=lambda span: (span[0], -span[1]))


def is_word(char: str | None) -> bool:
    return char is not None and (char.isalnum() or char == "_")


def is_ascii_word(char: str | None) -> bool:
    return is_word(char) and str(char).isascii()
