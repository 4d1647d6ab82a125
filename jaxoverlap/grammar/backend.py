"""Grammars on llguidance: compiled by a pool of threads, kept for the next request, masks filled without the GIL."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from jaxoverlap.core import Grammar
from jaxoverlap.grammar.schema import read_schema
from jaxoverlap.tokenizer import Tokenizer

KEPT = 256  # compiled grammars
COMPILERS = 2  # threads
MOST_LINES, LONGEST_LINE = 8, 160  # of an error; it may repeat the whole grammar
# llguidance's own bounds on a mask's work are milliseconds; that on building a lexer is a fifth of its default, since a
# fresh state pays for some of it again, in the turn of its first mask.
LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


class LLGrammar:
    """core.Grammar: one request's matcher. It has ended when nothing can follow, or with an end-of-sequence token,
    which its mask allows wherever the output may end."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def accept_token(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            raise ValueError(error_of(self.matcher))

    def is_terminated(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def fill_mask(self, words: np.ndarray, ahead: int) -> None:
        """`ahead` must be 1. Where llguidance gives up, only end-of-sequence tokens are allowed, and refused."""
        if ahead != 1:
            raise ValueError(f"llguidance masks one token ahead, not {ahead}")
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def after(self, token: int) -> LLGrammar:
        copy = self.matcher.deep_copy()
        copy.consume_token(token)
        return LLGrammar(copy)


class LLCompilation:
    """scheduler.grammar_queue.Compilation; requests that ask for the same grammar meanwhile share the work."""

    def __init__(self, future: Future[LLMatcher]) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> LLGrammar:
        return LLGrammar(self.future.result().deep_copy())

    def cancel(self) -> bool:
        """The grammar is compiled all the same, for the others."""
        return False


class LLGuidanceBackend:
    """scheduler.grammar_queue.GrammarBackend for one model.

    `vocab_size` is the model's; ids that the tokenizer does not have are never allowed. `whitespace_pattern`: regular
    expression of what may stand between the parts of JSON. Raises ValueError for a tokenizer that llguidance cannot
    use, or a pattern that is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], whitespace_pattern: str
    ) -> None:
        try:
            self.tokenizer = LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except ValueError as e:
            raise ValueError(f"grammar_backend llguidance cannot use this tokenizer: {e}; set it to none") from None
        self._json_options: Any = {"whitespace_pattern": whitespace_pattern, "lenient": False, "coerce_one_of": False}
        self._executor = LLExecutor()
        self._pool = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._lock = threading.Lock()  # guards what follows
        self._kept: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._compiling: dict[tuple[str, str], Future[LLMatcher]] = {}
        try:
            self._compile(("json_schema", '{"type": "array"}'))
        except ValueError as e:
            raise ValueError(f"constrained_json_whitespace_pattern {whitespace_pattern!r}: {e}") from None

    def compiled(self, key: tuple[str, str]) -> LLGrammar | None:
        with self._lock:
            matcher = self._kept.get(key)
            if matcher is None:
                return None
            self._kept.move_to_end(key)
        return LLGrammar(matcher.deep_copy())

    def compile(self, key: tuple[str, str]) -> LLCompilation:
        with self._lock:
            future = self._compiling.get(key)
            if future is None:
                future = self._compiling[key] = self._pool.submit(self._compile_and_keep, key)
        return LLCompilation(future)

    def fill_masks(self, rows: Sequence[tuple[int, Grammar]], words: np.ndarray) -> None:
        """The mask of each (row, grammar) into int32 [B, 1, ceil(vocab / 32)], in parallel and without the GIL."""
        matchers = [(cast(LLGrammar, grammar).matcher, i) for i, grammar in rows]
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile_and_keep(self, key: tuple[str, str]) -> LLMatcher:
        try:
            matcher = self._compile(key)
        finally:
            with self._lock:
                del self._compiling[key]
        with self._lock:
            self._kept[key] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _compile(self, key: tuple[str, str]) -> LLMatcher:
        """Raises ValueError with llguidance's message."""
        try:
            matcher = LLMatcher(self.tokenizer, self._grammar(*key), log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # an output must be able to begin
        except ValueError:
            raise
        except BaseException as e:  # a panic of llguidance is no Exception
            raise ValueError(f"llguidance failed: {e}") from None
        if matcher.is_error():
            raise ValueError(f"{key[0]}: {error_of(matcher)}")
        return matcher

    def _grammar(self, kind: str, text: str) -> str:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(read_schema(text)), overrides=self._json_options)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        return grammar_from("ebnf", text)


def error_of(matcher: LLMatcher) -> str:
    """llguidance's message, without what it repeats of the grammar."""
    lines = matcher.get_error().split("\n<")[0].strip().splitlines()
    message = "\n".join(line[:LONGEST_LINE] for line in lines[:MOST_LINES])
    return "it allows no output" if message in ("", "NoExtensionBias") else message
