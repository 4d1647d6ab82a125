import dataclasses
import json
import subprocess
import sys

import pytest
from helpers_engine import byte_level_tokenizer, host_engine, oracle

import jaxoverlap
from jaxoverlap import cli
from jaxoverlap.commands import generate
from jaxoverlap.config import NEED_PRIORITIES, NEED_RANKS, NEED_SPECULATION, EngineConfig
from jaxoverlap.engine import Engine


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def parse(*argv):
    return cli.make_parser().parse_args(list(argv))


GENERATE = ["generate", "--input-ids", "5,6"]


def test_every_setting_has_its_flag():
    for field in dataclasses.fields(EngineConfig):
        flag = f"--{field.name.replace('_', '-')}"
        value = {bool: [], int: ["4"]}.get(type(field.default))
        if not field.metadata["flag"]:
            with pytest.raises(SystemExit):
                parse(*GENERATE, flag, "1")
        elif value is not None:
            needed = ["--enable-priority-scheduling"] if field.name in NEED_PRIORITIES else []
            if field.name in (*NEED_SPECULATION, "speculative_grammar_overlap"):
                needed = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-layers", "2"]
            if field.name == "dp_size":
                needed = ["--enable-dp-attention"]
            if field.name in NEED_RANKS:
                needed = ["--dp-size", "2", "--enable-dp-attention"]
            args = parse(*GENERATE, *needed, flag, *value)
            want = True if not value else 4
            assert getattr(cli.read_config(args), field.name) == want


def test_flag_over_environment_over_the_commands_default(monkeypatch):
    assert cli.read_config(parse(*GENERATE), page_size=8).page_size == 8
    monkeypatch.setenv("JAXOVERLAP_PAGE_SIZE", "4")
    monkeypatch.setenv("JAXOVERLAP_DISABLE_RADIX_CACHE", "1")
    assert cli.read_config(parse(*GENERATE), page_size=8).page_size == 4
    assert cli.read_config(parse(*GENERATE, "--page-size", "2"), page_size=8).page_size == 2
    assert cli.read_config(parse(*GENERATE)).disable_radix_cache
    assert not cli.read_config(parse(*GENERATE, "--no-disable-radix-cache")).disable_radix_cache


def test_model_is_short_for_model_path():
    assert cli.read_config(parse(*GENERATE, "--model", "checksum")).model_path == "checksum"
    assert cli.read_config(parse(*GENERATE, "--model-path", "x")).model_path == "x"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        ([*GENERATE, "--page-siz", "4"], "--page-siz"),
        ([*GENERATE, "--page-size", "four"], "'four'"),
        ([*GENERATE, "--schedule-policy", "lifo"], "'lifo'"),
        (["generate"], "--prompt"),
        (["generate", "--input-ids", "1,x"], "'1,x'"),
        (["generate", "--prompt", "a", "--input-ids", "1"], "--input-ids"),
        (["compare", "--batch", "0"], "'0'"),
        (["compare", "--disable-overlap-schedule"], "--disable-overlap-schedule"),
    ],
)
def test_flags_that_argparse_refuses(capsys, argv, part):
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    assert e.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([*GENERATE, "--page-size", "0"], "page_size must be at least 1"),
        ([*GENERATE, "--top-p", "0"], "top_p"),
        ([*GENERATE, "--temperature", "-1"], "temperature"),
        ([*GENERATE, "--chat"], "--chat needs --prompt"),
        ([*GENERATE, "--json", "/no/such/x"], "/no/such"),
    ],
)
def test_mistakes_are_usage_errors(capsys, monkeypatch, argv, part):
    monkeypatch.setattr(Engine, "from_config", lambda *a, **k: pytest.fail("something was started"))
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert part in err
    assert "Traceback" not in err


def test_a_wrong_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("JAXOVERLAP_PAGE_SIZ", "4")
    code, _, err = run(capsys, *GENERATE)
    assert code == 2
    assert "JAXOVERLAP_PAGE_SIZ" in err


@pytest.fixture
def on_host(monkeypatch):
    """Commands run on the NumPy device; returns the engines' settings."""
    seen = []

    def make(config, progress=None):
        seen.append(config)
        text = config.model_path != "checksum"
        tokenizer = byte_level_tokenizer() if text else None
        if text:
            tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
        return host_engine(tokenizer=tokenizer, max_running_requests=config.max_running_requests)

    monkeypatch.setattr(Engine, "from_config", make)
    return seen


def test_generate_ids(capsys, on_host):
    code, out, _ = run(capsys, "generate", "--model", "checksum", "--input-ids", "5,6", "--max-new-tokens", "4")
    assert code == 0
    assert out == " ".join(map(str, oracle([5, 6], 4))) + "\n"
    assert on_host[0].max_running_requests == 1


def test_generate_text_and_json(capsys, on_host, tmp_path):
    path = tmp_path / "out.json"
    argv = ["generate", "--model", "x", "--prompt", "hi", "--max-new-tokens", "4", "--json", str(path)]
    code, out, _ = run(capsys, *argv)
    assert code == 0
    data = json.loads(path.read_text())
    assert data["results"][0]["output_ids"] == oracle(list(b"hi"), 4)
    assert out == data["results"][0]["text"] + "\n"
    assert data["output_tokens"] == 4
    assert data["tokens_per_s"] == pytest.approx(4 / data["wall_s"])


def test_generate_chat_and_several_prompts(capsys, on_host):
    argv = ["generate", "--model", "x", "--chat", "--prompt", "hi", "--prompt", "you", "--max-new-tokens", "3"]
    code, out, _ = run(capsys, *argv, "--json", "-")
    assert code == 0
    results = json.loads(out)["results"]
    assert [r["output_ids"] for r in results] == [oracle(list(b"u:hi|"), 3), oracle(list(b"u:you|"), 3)]
    code, out, _ = run(capsys, *argv)
    assert out.startswith("--- 0\n")


def test_generate_with_a_grammar(capsys, on_host, tmp_path):
    """Programs for grammars are compiled only where one is asked for; a schema is a file or the text itself."""
    path, schema = tmp_path / "schema.json", '{"type": "boolean"}'
    path.write_text(schema)
    for flags, backend in (
        ([], "none"),
        (["--json-schema", str(path)], "llguidance"),
        (["--regex", "a"], "llguidance"),
    ):
        run(capsys, *GENERATE, *flags)
        assert on_host[-1].grammar_backend == backend
    for given in (str(path), schema):
        assert generate.sampling_params(parse(*GENERATE, "--json-schema", given)).json_schema == schema
    with pytest.raises(SystemExit):
        parse(*GENERATE, "--json-schema", str(tmp_path / "none.json"))
    assert "neither a JSON object nor a readable file" in capsys.readouterr().err


def test_generate_n_and_a_stop_regex(capsys, on_host):
    argv = ["generate", "--model", "x", "--prompt", "hi", "--n", "2", "--max-new-tokens", "3"]
    code, out, _ = run(capsys, *argv, "--json", "-")
    assert code == 0
    assert [r["output_ids"] for r in json.loads(out)["results"]] == [oracle(list(b"hi"), 3)] * 2
    assert on_host[0].max_running_requests == 2
    code, _, err = run(capsys, *argv, "--stop-regex", "a", "--stop-regex", "(")
    assert code == 2
    assert "stop_regex '('" in err


@pytest.mark.parametrize("count", [1, 2])
def test_a_refused_prompt_is_an_error(capsys, on_host, count):
    argv = ["generate", "--model", "checksum", *["--input-ids", "5,1000"] * count]
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert "input_ids holds 1000" in err


def test_a_prompt_without_a_tokenizer_names_the_way_out(capsys, on_host):
    code, _, err = run(capsys, "generate", "--model", "checksum", "--prompt", "hi")
    assert code == 2
    assert "--input-ids" in err


def test_an_interrupt_is_130(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.Engine, "from_config", interrupted)
    code, _, err = run(capsys, *GENERATE)
    assert code == 130
    assert err.strip() == "interrupted"


def test_unknown_models(capsys):
    code, _, err = run(capsys, *GENERATE, "--model", "no/such/model")
    assert code == 1
    assert "no/such/model" in err
    code, _, err = run(capsys, "fetch", "no-such-model")
    assert code == 1
    assert "no-such-model" in err


def test_env(capsys):
    code, out, err = run(capsys, "env", "--json", "-", "--max-running-requests", "5", "--chunked-prefill-size", "64")
    assert code == 0
    data = json.loads(out)
    assert data["decode_buckets"] == [1, 2, 4, 5]
    assert data["extend_buckets"][-1] == 64
    assert data["packages"]["jaxoverlap"]
    assert data["devices"]
    assert "devices" in err
    assert all(name in ("pallas", "xla", "interpret") for name in data["kernels"].values())


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "jaxoverlap", "--help"], capture_output=True, text=True, check=True)
    for name in ("fetch", "generate", "compare", "env"):
        assert name in done.stdout


def test_importing_loads_no_jax():
    code = "import sys, jaxoverlap.cli; jaxoverlap.cli.make_parser(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_the_package_offers():
    for name in jaxoverlap.__all__:
        assert getattr(jaxoverlap, name) is not None
    assert jaxoverlap.Engine is Engine
