"""Backends over small tokenizers, masks as sets of ids, and the JSON texts of a value."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers_engine import byte_level_tokenizer

from jaxoverlap.grammar.backend import LLGuidanceBackend

END = 256  # the byte-level tokenizer's end of sequence
SPACES = "[ ]?"


def byte_backend(vocab_size=272, whitespace_pattern=SPACES):
    """Over bytes: token t < 256 is byte t."""
    return LLGuidanceBackend(byte_level_tokenizer(), vocab_size, (END,), whitespace_pattern)


def grammar(backend, kind, text):
    """A fresh state. Raises ValueError for a grammar that is none."""
    return backend.compiled((kind, text)) or backend.compile((kind, text)).result()


def allowed(backend, state, vocab_size=272):
    """The ids that the next token may have."""
    words = np.full((1, 1, -(-vocab_size // 32)), -1, np.int32)
    backend.fill_masks([(0, state)], words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8).ravel(), bitorder="little")).tolist())


def takes(backend, kind, text, tokens):
    """Whether the tokens are a whole output of the grammar, each allowed by the mask before it."""
    state, vocab_size = grammar(backend, kind, text), backend.tokenizer.vocab_size
    for token in tokens:
        if state.is_terminated() or token not in allowed(backend, state, vocab_size):
            return False
        state.accept_token(token)
    return state.is_terminated() or backend.tokenizer.eos_token in allowed(backend, state, vocab_size)


def texts(value):
    """JSON texts of the value, one of which a grammar must accept if the value is valid: keys in any order, whole
    numbers without a fraction, ', ' and ': ' between the parts."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for parts in itertools.product(*(list(texts(value[k])) for k in keys)):
                pairs = (f"{json.dumps(k, ensure_ascii=False)}: {part}" for k, part in zip(keys, parts))
                yield "{" + ", ".join(pairs) + "}"
    elif isinstance(value, list):
        for parts in itertools.product(*(list(texts(x)) for x in value)):
            yield "[" + ", ".join(parts) + "]"
    elif isinstance(value, float) and value.is_integer():
        yield str(int(value))
    else:
        yield json.dumps(value, ensure_ascii=False)
