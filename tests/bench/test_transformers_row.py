"""The transformers row of `bench offline`: it decodes what the engine does, and says so where it cannot be measured."""

import json
import sys

import numpy as np
import pytest
from helpers_models import make_hf_dir

from jaxoverlap.bench import transformers_row
from jaxoverlap.cli import main

FLAGS = "--batch 1,2 --requests 2 --turns 6 --skip-warmup --dtype float32"


def offline(directory, more=""):
    return main(f"bench offline --model {directory} {FLAGS} {more}".split())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_hf_dir(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_row_decodes_what_the_engine_does(capsys, tiny):
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    if problem := transformers_row.why_not():
        pytest.skip(problem)
    assert offline(tiny, "--json -") == 0
    data = json.loads(capsys.readouterr().out)["offline"]
    assert "LlamaForCausalLM, float32, static cache" in data["transformers"]
    for x in data["batches"].values():
        row = x["transformers"]
        assert row["same_tokens"] == row["tokens"] == 6
        for variant in transformers_row.VARIANTS:
            assert 0 < row[f"{variant}_ms"]["p50"] <= row[f"{variant}_ms"]["p90"]


@pytest.mark.filterwarnings("ignore")
def test_both_variants_decode_what_generate_does(tiny):
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    if problem := transformers_row.why_not():
        pytest.skip(problem)
    model = transformers_row.load_model(str(tiny), "float32")
    prompts = np.array([[5, 9, 33, 70], [100, 7, 8, 1]])
    more = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.from_numpy(prompts), **more)[:, 4:].numpy()
    static = transformers_row.StaticDecode(model, 2, 12)
    for variant in transformers_row.VARIANTS:
        seconds, tokens = static.time(prompts, 6, variant)
        assert len(seconds) == 5
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_packages_one_line_says_what_is_needed(capsys, monkeypatch, tiny, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert offline(tiny, "--json -") == 0
    data = json.loads(capsys.readouterr().out)["offline"]
    assert data["transformers"].startswith("no transformers row: it needs ")
    assert missing in data["transformers"].removesuffix("[torch]").split(":")[1]
    assert data["transformers"].endswith('pip install "jaxoverlap[torch]"')
    assert all("transformers" not in x for x in data["batches"].values())
    assert offline(tiny) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines).count("no transformers row") == 1


def test_same_tokens_counts_leading_columns():
    ours = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert transformers_row.same_tokens(ours, ours) == 4
    assert transformers_row.same_tokens(ours, np.array([[1, 2, 0, 4], [5, 6, 7, 8]])) == 2
    assert transformers_row.same_tokens(ours, np.array([[1, 2, 3, 4], [0, 6, 7, 8]])) == 0
