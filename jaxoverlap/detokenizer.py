"""From token ids to the text that a caller sees: incremental, whole characters only, cut at the stop.

For every request the joined deltas are `tokenizer.decode` of its shown ids (without a matched stop, see `final_text`),
whatever the pieces in which the ids arrive; nothing that was given out is ever taken back. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from jaxoverlap.core import FinishReason
from jaxoverlap.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def byte_tokens(token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Ids of the tokens that stand for one raw byte (byte fallback); their neighbours can change their text."""
    ids = (token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def final_text(decoder: Decoder, ids: Sequence[int], params: SamplingParams, reason: FinishReason | None) -> str:
    """The text of a request that ended with `reason`.

    A matched stop string is cut off where it begins, a matched stop token is left out; with `no_stop_trim` the text
    ends where the stop ends. A stop string that only exists in special tokens that are skipped cuts nothing.
    """
    matched = reason.matched if reason is not None and reason.type == "stop" else None
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = decoder.decode(ids, params.skip_special_tokens)
    if isinstance(matched, str) and (at := text.find(matched)) >= 0:
        text = text[: at + len(matched)] if params.no_stop_trim else text[:at]
    return text


class Detokenizer:
    """The text of one request while it grows.

    `add` returns text only when no later token can change it: a character's bytes may be spread over several tokens,
    and text that may begin a stop string waits until it is known not to.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, byte_ids: Collection[int] = ()) -> None:
        self._decoder = decoder
        self._params = params
        self._byte_ids = byte_ids
        self._ids: list[int] = []
        self._begin = 0  # ids[begin:read] are settled and give the decoder its context
        self._read = 0
        self._settled = ""
        self._shown = 0  # characters given out

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._settled[: self._shown]

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next token ids of an unfinished request and returns the new text, which may be empty."""
        self._ids.extend(ids)
        self._settle()
        begin = self._shown
        self._shown = max(begin, len(self._settled) - held_back(self._settled, self._stops))
        return self._settled[begin : self._shown]

    def finish(self, ids: Sequence[int], reason: FinishReason | None) -> str:
        """Takes the last ids (those after the last `add`) and returns the rest of the text."""
        self._ids.extend(ids)
        begin = self._shown
        given = self.text
        text = final_text(self._decoder, self._ids, self._params, reason)
        # a decoder that rewrites old text when new ids come cannot take back what was given out
        self._settled = text if text.startswith(given) else given
        self._shown = len(self._settled)
        return self._settled[begin:]

    @property
    def _stops(self) -> tuple[str, ...]:
        return tuple(self._params.stop or ())

    def _settle(self) -> None:
        if self._read == len(self._ids) or self._ids[-1] in self._byte_ids:
            return
        skip = self._params.skip_special_tokens
        window = self._decoder.decode(self._ids[self._begin :], skip)
        if window.endswith(REPLACEMENT):
            return
        known = self._decoder.decode(self._ids[self._begin : self._read], skip)
        new = window[len(known) :]
        self._settled += new
        if new:  # a context without text would let the decoder strip the next token's leading space
            self._begin = self._read
        self._read = len(self._ids)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `stops`."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
