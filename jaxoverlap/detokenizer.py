"""From token ids to the text that a caller sees: incremental, whole characters only, cut at the stop.

For every request the joined deltas are `tokenizer.decode` of its shown ids (without a matched stop, see `final_text`),
whatever the pieces in which the ids arrive; nothing that was given out is ever taken back. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from jaxoverlap.core import FinishReason
from jaxoverlap.growing_text import REPLACEMENT, GrowingText
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.stop_regex import Scan, compile_stop_regex


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def final_text(decoder: Decoder, ids: Sequence[int], params: SamplingParams, reason: FinishReason | None) -> str:
    """The text of a request that ended with `reason`.

    A matched stop string or regular expression is cut off where it begins, a matched stop token is left out; with
    `no_stop_trim` the text ends where the stop ends. A stop that only exists in special tokens that are skipped cuts
    nothing.
    """
    matched = reason.matched if reason is not None and reason.type == "stop" else None
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = decoder.decode(ids, params.skip_special_tokens)
    if not isinstance(matched, str):
        return text
    # a stop ends in the text of the last token; the same text before it was no stop, with special tokens between
    before = len(decoder.decode(ids[:-1], params.skip_special_tokens).rstrip(REPLACEMENT))
    span = None
    if matched in (params.stop or ()) and (at := text.find(matched, max(0, before - len(matched) + 1))) >= 0:
        span = at, at + len(matched)
    elif matched in (params.stop_regex or ()):
        regex = compile_stop_regex(matched)
        span = regex.read(regex.read(Scan(), text[:before]), text[before:]).found
    return text if span is None else text[: span[1] if params.no_stop_trim else span[0]]


class Detokenizer:
    """The text of one request while it grows.

    `add` returns text only when no later token can change it: a character's bytes may be spread over several tokens,
    and text that may begin a stop waits until it is known not to.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams, byte_ids: Collection[int] = ()) -> None:
        self._decoder = decoder
        self._params = params
        self._grown = GrowingText(partial(decoder.decode, skip_special_tokens=params.skip_special_tokens), byte_ids)
        # what a match of them ends is shown with no_stop_trim: then nothing has to wait
        self._regexes = [] if params.no_stop_trim else [compile_stop_regex(p) for p in params.stop_regex or ()]
        self._scans = [Scan() for _ in self._regexes]
        self._final: str | None = None
        self._shown = 0  # characters given out

    @property
    def text(self) -> str:
        """All text given out so far."""
        return (self._grown.settled if self._final is None else self._final)[: self._shown]

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next token ids of an unfinished request and returns the new text, which may be empty."""
        new = self._grown.add(ids)
        self._scans = [regex.read(scan, new) for regex, scan in zip(self._regexes, self._scans)]
        settled = self._grown.settled
        known = len(settled) - held_back(settled, self._params.stop or ())
        known = min([known, *(regex.begun(scan) for regex, scan in zip(self._regexes, self._scans))])
        begin, self._shown = self._shown, max(self._shown, known)
        return settled[begin : self._shown]

    def finish(self, ids: Sequence[int], reason: FinishReason | None) -> str:
        """Takes the last ids (those after the last `add`) and returns the rest of the text."""
        begin, given = self._shown, self.text
        text = final_text(self._decoder, [*self._grown.ids, *ids], self._params, reason)
        # a decoder that rewrites old text when new ids come cannot take back what was given out
        self._final = text if text.startswith(given) else given
        self._shown = len(self._final)
        return self._final[begin:]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of one of `stops`."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
