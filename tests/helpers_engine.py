"""Engines for tests: over the NumPy device (no compiling), over the checksum model on JAX, and tokenizers made here."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import models as token_models

from jaxoverlap.config import EngineConfig
from jaxoverlap.driver import Driver
from jaxoverlap.engine import Engine
from jaxoverlap.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent / "scheduler"))
from host_runner import HostRunner

EOS = 2


def next_token(context):
    """The checksum rule, written out again."""
    h = 7
    for i, t in enumerate(context):
        h = (h * 31 + (int(t) + 1) * (i % 13 + 1)) % 1_000_003
    return 10 + h % 900


def oracle(prompt, n, stops=()):
    out = []
    while len(out) < n and not (out and out[-1] in stops):
        out.append(next_token([*prompt, *out]))
    return out


def model_of(tokenizer=None, context_length=128, module=None, vocab_size=1000, eos=(EOS,)):
    """What registry.load gives, around any module."""
    config = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=eos)
    if module is not None:
        config = module.config
    return SimpleNamespace(
        name="test",
        module=module,
        config=config,
        tokenizer=tokenizer,
        context_length=context_length,
        sampling_defaults={},
    )


def host_engine(
    *, tokenizer=None, scripts=None, context_length=128, vocab_size=1000, wrap=None, max_total_tokens=256, **config
):
    """`scripts` {rid: [output ids]}; `wrap` puts something around the runner."""
    settings = {"model_path": "checksum", "max_running_requests": 4, "audit": True, "random_seed": 0, **config}
    config = EngineConfig(**settings)
    runner = HostRunner(
        rows=config.max_running_requests + 1,
        context_length=context_length,
        num_pages=max_total_tokens // config.page_size,
        page_size=config.page_size,
        scripts={rid: dict(enumerate(ids)) for rid, ids in (scripts or {}).items()},
        max_logprobs=config.max_logprobs,
    )
    model = model_of(tokenizer, context_length, vocab_size=vocab_size)
    return Engine.from_parts(config, model, wrap(runner) if wrap else runner, max_total_tokens)


def check_all_back(engine):
    """Every slot and page is free or cached, nothing is left in flight, and a flush frees the cached pages."""
    engine.wait_idle()
    m = engine.metrics()
    assert (m["waiting"], m["running"], m["unfinished"], m["in_flight"]) == (0, 0, 0, 0)
    assert m["free_slots"] == engine.config.max_running_requests
    assert m["free_tokens"] + m["evictable_tokens"] == m["max_total_tokens"]
    assert engine.flush_cache()
    assert engine.metrics()["free_tokens"] == m["max_total_tokens"]


def byte_level_tokenizer():
    """Ids 0-255: the bytes in order; 256 '<|end|>' (special); 257-: merged pairs of bytes."""
    alphabet = byte_alphabet()
    vocab = {char: byte for byte, char in alphabet.items()}
    backend = tokenizers.Tokenizer(token_models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, None)


def byte_alphabet():
    """{byte: the character that stands for it}, GPT-2's table: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    rest = [b for b in range(256) if b not in table]
    return table | {b: chr(256 + i) for i, b in enumerate(rest)}


def byte_fallback_tokenizer():
    """Llama 2's manner: ids 0-255 are '<0xNN>', then words with a leading space mark; the first space is stripped."""
    words = ["▁", "▁a", "b", "▁世", "界", "▁▁"]
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    vocab["<unk>"] = len(vocab)
    backend = tokenizers.Tokenizer(token_models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend, {}, None)


class SeeingDriver(Driver):
    """Calls `see(ask)` before it answers."""

    def __init__(self, runner, see):
        super().__init__(runner)
        self.answers = {kind: partial(self.answer_seen, see, answer) for kind, answer in self.answers.items()}

    @staticmethod
    def answer_seen(see, answer, ask):
        see(ask)
        return answer(ask)
