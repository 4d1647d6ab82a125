"""Where a request's output matches one of its regular expressions (stop_regex): each token is read once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxoverlap.growing_text import GrowingText
from jaxoverlap.stop_regex import Scan, compile_stop_regex


class StopText:
    """The output text of one request and how far `patterns` have searched it; special tokens are text here, as in
    SGLang. The text may be read by runs of any length: it is looked at after every token, as if each came alone."""

    def __init__(
        self, patterns: Sequence[str], decode: Callable[[Sequence[int]], str], byte_ids: Collection[int]
    ) -> None:
        self._text = GrowingText(decode, byte_ids)
        self._regexes = [compile_stop_regex(pattern) for pattern in patterns]
        self._scans = [Scan() for _ in patterns]

    def find(self, outputs: np.ndarray) -> tuple[int, str] | None:
        """Reads the tokens of `outputs` (int32 [n], all of the request's) that have not been read. Returns the number
        of tokens, and the first pattern of those that match, as soon as one does."""
        for token in outputs[len(self._text.ids) :].tolist():
            new = self._text.add([token])
            now = "" if new else self._text.unsettled()  # seen, but read again when it is settled
            for i, regex in enumerate(self._regexes):
                scan = self._scans[i] = regex.read(self._scans[i], new)
                if (regex.read(scan, now) if now else scan).found:
                    return len(self._text.ids), regex.pattern
        return None
