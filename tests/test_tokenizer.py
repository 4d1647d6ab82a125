"""Text, ids and chat templates."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from helpers_models import make_tokenizer
from tokenizers.processors import TemplateProcessing

from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.tokenizer import Tokenizer

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_goldens.json").read_text())["cases"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


@pytest.fixture
def directory(tmp_path):
    make_tokenizer(tmp_path)
    return tmp_path


def set_template(directory, template):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


def render(directory, **variables):
    return Tokenizer.from_dir(directory).apply_chat_template(CHAT, **variables)


def test_imports_no_jax():
    code = "import sys, jaxoverlap.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bytes_come_back(directory):
    tokenizer = Tokenizer.from_dir(directory)
    text = "naïve 世界 🙂\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(np.asarray(ids, np.int32)) == text
    assert tokenizer.decode(ids[:-2]) == "naïve 世界 �"


def test_special_tokens(directory):
    tokenizer = Tokenizer.from_dir(directory)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, tokenizer.special_ids) == (258, 257, {256, 257})
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert [ids[0], ids[-1], len(ids)] == [256, 257, 3]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.decode_batch([ids, ids[:1], []]) == ["a", "", ""]


def test_chat(directory):
    tokenizer = Tokenizer.from_dir(directory)
    plain = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=False) == plain
    assert tokenizer.apply_chat_template(CHAT) == plain + "<|im_start|>assistant\n"
    ids = tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == plain
    assert ids.count(256) == ids.count(257) == 2


def test_special_tokens_of_a_text_are_not_added_to_a_chat(directory):
    """A tokenizer that puts its BOS before every text: a template writes its own."""
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)])
    backend.save(str(path))
    tokenizer = Tokenizer.from_dir(directory)
    assert tokenizer.encode("Hi")[0] == 256
    assert tokenizer.encode("Hi", add_special_tokens=False)[0] != 256
    assert tokenizer.encode_chat(CHAT, add_generation_prompt=False).count(256) == 2


def test_template_file_comes_first(directory):
    set_template(directory, "from the configuration")
    assert render(directory) == "from the configuration"
    (directory / "chat_template.jinja").write_text("from the file")
    assert render(directory) == "from the file"


def test_named_templates(directory):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    set_template(directory, named)
    assert render(directory) == "<|im_end|>"


def test_template_helpers(directory):
    """What published templates use: loop controls, block trimming, tojson as it is, the date, variables, refusal."""
    text = "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}"
    set_template(directory, text + "{{ strftime_now('%Y') | length }}{{ extra | tojson }}{{ tools is none }}")
    assert render(directory, extra="<é>") == '{"role": "user", "content": "Hi"}\n4"<é>"True'
    set_template(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="chat template: roles must alternate"):
        render(directory)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ missing.field }}", "{% for %}"],
)
def test_template_is_sandboxed_and_its_errors_are_value_errors(directory, template):
    set_template(directory, template)
    with pytest.raises(ValueError, match="chat template: "):
        render(directory)


def test_chat_errors(directory):
    with pytest.raises(ValueError, match=r"messages\[0\] must be a mapping with a role, not 'Hi'"):
        Tokenizer.from_dir(directory).apply_chat_template(["Hi"])
    set_template(directory, None)
    with pytest.raises(ValueError, match="this model has no chat template"):
        render(directory)


def test_file_errors(directory):
    (directory / "tokenizer_config.json").write_text('{"eos_token": 5}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: eos_token must be a string"):
        Tokenizer.from_dir(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a readable tokenizer"):
        Tokenizer.from_dir(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: no such file"):
        Tokenizer.from_dir(directory)


@pytest.mark.demo
def test_demo_prompts(demo_model):
    """The ids that the original tokenizer and template gave, and the texts of the answers."""
    tokenizer = Tokenizer.from_dir(demo_model)
    for case in GOLDENS:
        message = [{"role": "user", "content": case["prompt"]}]
        ids = tokenizer.encode_chat(message) if case["chat"] else tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.demo
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([49, 216, 7906, 240, 369], "A 世ab"),
        ([183, 220, 137, 181, 127, 134, 183, 220, 129], "삼겹살"),
        ([10813, 38887, 10907], "🙂 ok"),
    ],
)
def test_demo_characters_that_span_tokens(demo_model, ids, text):
    tokenizer = Tokenizer.from_dir(demo_model)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == ids
