"""Text of token ids that come bit by bit. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"


def byte_tokens(token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Ids of the tokens that stand for one raw byte (byte fallback); their neighbours can change their text."""
    ids = (token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


class GrowingText:
    """What `decode` makes of ids that come bit by bit, without decoding them all again each time.

    `settled` is the text that no later id can change: a character's bytes may be spread over several ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_ids: Collection[int] = ()) -> None:
        self.ids: list[int] = []
        self.settled = ""
        self._decode = decode
        self._byte_ids = byte_ids
        self._begin = 0  # ids[begin:read] are settled and give the decoder its context
        self._read = 0

    def add(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids have settled, which may be empty."""
        self.ids.extend(ids)
        if self._read == len(self.ids) or self._ends_in_bytes():
            return ""
        window = self._decode(self.ids[self._begin :])
        if window.endswith(REPLACEMENT):
            return ""
        new = window[self._known() :]
        self.settled += new
        if new:  # a context without text would let the decoder strip the next token's leading space
            self._begin = self._read
        self._read = len(self.ids)
        return new

    def unsettled(self) -> str:
        """The text behind `settled`, as it is with the ids so far."""
        return "" if self._read == len(self.ids) else self._decode(self.ids[self._begin :])[self._known() :]

    def _ends_in_bytes(self) -> bool:
        """Whether the last text is raw bytes. What has no text, as a special token that is skipped, ends no run."""
        for at in range(len(self.ids) - 1, self._read - 1, -1):
            if self.ids[at] in self._byte_ids:
                return self._decode(self.ids[at:]) == self._decode(self.ids[at : at + 1])
        return False

    def _known(self) -> int:
        """Characters of the context."""
        return len(self._decode(self.ids[self._begin : self._read]))
