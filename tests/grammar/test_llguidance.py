"""The llguidance backend over single bytes, where every mask can be worked out by hand."""

import re
import threading

import numpy as np
import pytest
from helpers_grammar import END, SPACES, allowed, byte_backend, grammar, takes
from helpers_models import make_tokenizer

from jaxoverlap.grammar import backend as backend_module
from jaxoverlap.grammar.backend import LLGuidanceBackend
from jaxoverlap.tokenizer import Tokenizer

WORDS = ["a", "abc", "abd", "b", "bcd", "xyz", "é"]


@pytest.fixture(scope="module")
def backend():
    backend = byte_backend()
    yield backend
    backend.shutdown()


def following(prefix, words):
    """By hand: the next bytes of those of `words` that go on behind `prefix`, and the end where one is whole."""
    whole = [word.encode() for word in words]
    out = {w[len(prefix)] for w in whole if w.startswith(prefix) and len(w) > len(prefix)}
    return out | ({END} if prefix in whole else set())


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "|".join(WORDS), WORDS),
        ("regex", "^(a|abc)$", ["a", "abc"]),
        ("ebnf", "root ::= " + " | ".join(f'"{w}"' for w in WORDS), WORDS),
        ("ebnf", 'start: "a" | /abc/ | "abd"', ["a", "abc", "abd"]),
        ("json_schema", '{"enum": ["a", "abc", 7]}', ['"a"', '"abc"', "7"]),
        ("json_schema", '{"type": "boolean"}', ["true", "false"]),
    ],
)
def test_masks_and_ends(backend, kind, text, words):
    for word in words:
        state, prefix = grammar(backend, kind, text), b""
        for token in word.encode():
            assert not state.is_terminated()
            assert allowed(backend, state) == following(prefix, words)
            state.accept_token(token)
            prefix += bytes([token])
        may_go_on = following(prefix, words) != {END}
        assert state.is_terminated() != may_go_on  # nothing can follow: no token is sampled for it
        if may_go_on:
            assert END in allowed(backend, state)
            state.accept_token(END)
            assert state.is_terminated()


def test_an_unlimited_grammar_ends_with_the_end_of_sequence(backend):
    state = grammar(backend, "regex", "[0-9]+")
    digits = {ord(c) for c in "0123456789"}
    assert allowed(backend, state) == digits
    state.accept_token(ord("7"))
    assert allowed(backend, state) == digits | {END}
    assert not state.is_terminated()
    state.accept_token(END)
    assert state.is_terminated()


def test_a_refused_token_raises_and_an_ended_state_stays_so(backend):
    state = grammar(backend, "regex", "ab")
    with pytest.raises(ValueError, match="satisfy"):
        state.accept_token(ord("x"))
    assert not state.is_terminated()  # an error is no end
    state = grammar(backend, "regex", "ab")
    assert state.after(ord("a")).after(ord("b")).is_terminated()
    assert allowed(backend, state) == {ord("a")}  # untouched


def test_any_json(backend):
    for text in ('{"a": [1, null]}', "[]", '"x"', "-1.5e3", "true"):
        assert takes(backend, "json_schema", "$$ANY$$", text.encode())
        assert takes(backend, "json_schema", "true", text.encode())
    assert not takes(backend, "json_schema", "$$ANY$$", b"{a: 1}")


@pytest.mark.parametrize(
    ("pattern", "compact", "spaced", "lines"), [(SPACES, 1, 1, 0), ("", 1, 0, 0), ("[ \\n]*", 1, 1, 1)]
)
def test_white_space(pattern, compact, spaced, lines):
    backend = byte_backend(whitespace_pattern=pattern)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}'
    for text, want in (
        ('{"a":1,"b":[1,2]}', compact),
        ('{"a": 1, "b": [1, 2]}', spaced),
        ('{\n  "a": 1\n}', lines),
        ('{"b":1}', 0),
    ):
        assert takes(backend, "json_schema", schema, text.encode()) == bool(want), text


def test_ids_beyond_the_tokenizer_are_never_allowed(tmp_path):
    make_tokenizer(tmp_path)  # 258 ids, 257 the end
    for vocab_size in (258, 272, 300):
        backend = LLGuidanceBackend(Tokenizer.from_dir(tmp_path), vocab_size, (257,), SPACES)
        words = np.full((3, 1, -(-vocab_size // 32)), -1, np.int32)
        backend.fill_masks([(1, grammar(backend, "regex", "(?s:.*)"))], words)
        ids = np.flatnonzero(np.unpackbits(words[1].view(np.uint8).ravel(), bitorder="little"))
        assert ids.max() == 257
        assert len(ids) > 100
        assert 256 not in ids  # a special token
        assert (words[[0, 2]] == -1).all()  # rows without a grammar are not touched


def test_rows_of_a_batch_are_filled_like_single_ones(backend):
    states = [grammar(backend, "regex", text) for text in ("[a-f]+", "[0-9]{3}", "(yes|no)", "[a-z]+x")]
    words = np.full((9, 1, 9), -1, np.int32)
    rows = [7, 0, 3, 4]
    backend.fill_masks(list(zip(rows, states)), words)
    for row, state in zip(rows, states):
        assert set(np.flatnonzero(np.unpackbits(words[row].view(np.uint8).ravel(), bitorder="little"))) == allowed(
            backend, state
        )
    assert (words[[1, 2, 5, 6, 8]] == -1).all()


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", "NaN", "NaN"),
        ("json_schema", "[1]", "must be an object or a boolean, not list"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", "false", "allows nothing"),
        ("json_schema", '{"$ref": "#/definitions/no"}', "does not exist"),
        ("json_schema", '{"$ref": "#"}', "it allows no output"),
        ("json_schema", '{"minimum": 3, "exclusiveMinimum": true}', "exclusiveMinimum must be a number, not True"),
        ("json_schema", '{"type": "string", "format": "no-such"}', "Unknown format: no-such"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"x-guidance": {"lenient": true}}', "x-guidance"),
        ("json_schema", '{"pattern": "^a$", "minLength": 2, "type": "string"}', "Unsatisfiable"),
        ("regex", "[", "unclosed character class"),
        ("regex", "(?=a)a", "look-around"),
        ("regex", "(" * 100_000 + ")" * 100_000, "nested parentheses"),
        ("ebnf", "nonsense", "GBNF"),
        ("ebnf", "root ::= other", "'other' not found"),
        ("ebnf", "start: " + "(" * 100_000 + '"a"' + ")" * 100_000, "too deeply nested"),
    ],
)
def test_refused_grammars(backend, kind, text, part):
    with pytest.raises(ValueError, match=re.escape(part)) as e:
        grammar(backend, kind, text)
    assert len(str(e.value)) < 1500


def test_tuples_of_draft_7_are_enforced(backend):
    schema = '{"type": "array", "items": [{"type": "string"}, {"type": "null"}], "additionalItems": false}'
    assert takes(backend, "json_schema", schema, b'["a", null]')
    assert not takes(backend, "json_schema", schema, b'["a", 1]')
    assert not takes(backend, "json_schema", schema, b'["a", null, 1]')


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a{1000}){1000}"),
        ("regex", "(a|b)*c(a|b){20}"),
        ("regex", "((a|aa)*){50}b"),
        ("regex", "(.{0,1000}a){0,1000}"),
        ("ebnf", 'root ::= root root | "a" | ""'),
    ],
)
def test_a_hostile_grammar_gives_masks_or_an_error(backend, kind, text):
    state = grammar(backend, kind, text)
    for _ in range(60):
        token = min(allowed(backend, state))
        gave_up = state.matcher.is_error()
        try:
            state.accept_token(token)
        except ValueError:  # with which its request ends
            assert state.matcher.is_error()
            assert not state.is_terminated()
            return
        assert not gave_up
        if state.is_terminated():
            return


def test_a_grammar_is_compiled_once_however_many_ask_for_it(monkeypatch):
    backend, began, go = byte_backend(), threading.Event(), threading.Event()
    compiled, compile_one = [], backend._compile

    def slow(key):
        compiled.append(key)
        began.set()
        go.wait()
        return compile_one(key)

    monkeypatch.setattr(backend, "_compile", slow)
    key = ("regex", "[a-z]{2}")
    waiting = [backend.compile(key) for _ in range(3)]
    began.wait()
    assert backend.compiled(key) is None
    assert not any(w.done() for w in waiting)
    assert not waiting[0].cancel()  # the others still wait
    go.set()
    states = [w.result() for w in waiting] + [backend.compiled(key)]
    states[0].accept_token(ord("a"))
    states[0].accept_token(ord("b"))
    assert [s.is_terminated() for s in states] == [True, False, False, False]
    assert compiled == [key]


def test_the_grammar_used_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(backend_module, "KEPT", 2)
    backend = byte_backend()
    for text in "abc":
        grammar(backend, "regex", text)
        assert backend.compiled(("regex", "a")) is not None
    assert [backend.compiled(("regex", text)) is not None for text in "abc"] == [True, False, True]


def test_a_failed_grammar_is_not_kept():
    backend = byte_backend()
    for _ in range(2):
        with pytest.raises(ValueError, match="unclosed"):
            grammar(backend, "regex", "[")
    assert grammar(backend, "regex", "a") is not None


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(ValueError, match="grammar_backend llguidance cannot use this tokenizer: vocab size too small"):
        byte_backend(vocab_size=200)
