"""Text to token ids and back, and chat templates, from a Hugging Face directory. Imports no jax."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.checkpoint.fields import Fields

Ids = Sequence[int] | np.ndarray
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """tokenizer.json, the special tokens of tokenizer_config.json and the chat template.

    Text is decoded as the tokenizer's decoder gives it: the clean-up of spaces that some configurations ask for is
    not done, since it would change text that has been streamed already.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)  # "eos_token" -> its text
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        eos = self.special_tokens.get("eos_token")
        self.eos_token_id = None if eos is None else backend.token_to_id(eos)

    @classmethod
    def from_dir(cls, directory: Path) -> Tokenizer:
        """Raises CheckpointError naming the file that is absent or not readable."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer: {e}") from None
        backend.no_padding()
        backend.no_truncation()
        config_path = directory / "tokenizer_config.json"
        fields = Fields.read(config_path) if config_path.exists() else Fields({}, str(config_path))
        special = {name: text for name in SPECIAL_TOKENS if (text := _token_text(fields, name)) is not None}
        return cls(backend, special, _chat_template(directory, fields))

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens among them; a model's vocabulary can be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: with what the tokenizer puts around a text, such as a BOS token."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        """An incomplete character comes out as U+FFFD; ids that the tokenizer does not know as nothing."""
        return self.backend.decode(_plain(ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(self, batch: Iterable[Ids], skip_special_tokens: bool = True) -> list[str]:
        return self.backend.decode_batch([_plain(ids) for ids in batch], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the model's prompt. `messages`: mappings with "role" and "content", oldest first.

        `variables` reach the template by name, as do the special tokens. Raises ValueError where there is no
        template, where a message is malformed, or where the template refuses the conversation.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{i}] must be a mapping with a role, not {message!r}")
        given = {**self.special_tokens, "tools": None, "documents": None, **variables}
        try:
            template = _environment().from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
        except TemplateError as e:
            raise ValueError(f"chat template: {e}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the conversation; the template writes the special tokens itself."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)


def _plain(ids: Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _token_text(fields: Fields, name: str) -> str | None:
    value = fields.values.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise fields.error(name, f"must be a string or an object with content, not {value!r}")
    return value


def _chat_template(directory: Path, fields: Fields) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = fields.values.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise fields.error("chat_template", "must be a string or a list of named templates")
    return template


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for; sandboxed, since a template comes with a download."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
