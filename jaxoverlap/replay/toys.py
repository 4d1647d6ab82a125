"""The scenarios' grammar: the language 910 911 ... 910+n-1 EOS, compiled after a set number of turns. It plugs in where
a real grammar backend does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxoverlap.core import Grammar
from jaxoverlap.replay.scenario import EOS

FIRST = 910


class ToyGrammar:
    def __init__(self, length: int) -> None:
        self.tokens = [*range(FIRST, FIRST + length), EOS]
        self.taken = 0

    def accept_token(self, token: int) -> None:
        if self.is_terminated() or token != self.tokens[self.taken]:
            raise ValueError(f"token {token} is not the {self.taken}-th of the toy language")
        self.taken += 1

    def is_terminated(self) -> bool:
        return self.taken == len(self.tokens)

    def fill_mask(self, words: np.ndarray, ahead: int) -> None:
        for j in range(min(ahead, len(self.tokens) - self.taken)):
            token = self.tokens[self.taken + j]
            words[j] = 0
            words[j, token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)

    def after(self, token: int) -> ToyGrammar:
        copy = ToyGrammar(len(self.tokens) - 1)
        copy.taken = self.taken
        copy.accept_token(token)
        return copy


class ToyCompilation:
    def __init__(self, backend: ToyGrammarBackend, key: tuple[str, str], ready_at: int) -> None:
        self.backend, self.key, self.ready_at = backend, key, ready_at

    def done(self) -> bool:
        return self.backend.turn() >= self.ready_at

    def result(self) -> ToyGrammar:
        self.backend.known.add(self.key)
        return ToyGrammar(int(self.key[1]))

    def cancel(self) -> bool:
        return True


class ToyGrammarBackend:
    """`turn` tells the turn of the replay; a compilation is done `compile_turns` after it was asked for."""

    def __init__(self, turn: Callable[[], int], compile_turns: int) -> None:
        self.turn = turn
        self.compile_turns = compile_turns
        self.known: set[tuple[str, str]] = set()

    def compiled(self, key: tuple[str, str]) -> ToyGrammar | None:
        return ToyGrammar(int(key[1])) if key in self.known else None

    def compile(self, key: tuple[str, str]) -> ToyCompilation:
        return ToyCompilation(self, key, self.turn() + self.compile_turns)

    def fill_masks(self, rows: Sequence[tuple[int, Grammar]], words: np.ndarray) -> None:
        for i, grammar in rows:
            grammar.fill_mask(words[i], words.shape[1])


def toy_text(ids: Sequence[int] | np.ndarray) -> str:
    """The text of token t is `<t>`."""
    return "".join(f"<{t}>" for t in ids)
