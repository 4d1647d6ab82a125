"""`bench gpu` in a size for CPU: what it counts, not what it times."""

import json

import pytest

from jaxoverlap.cli import main

SMALL = ["--batch", "1,4", "--context", "64", "--turns", "2", "--copy-mb", "1", "--requests", "3"]


@pytest.mark.soak
def test_a_size_for_cpu(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    command = ["bench", "gpu", "--config", "tiny", *SMALL, "--shortest", "4", "--longest", "9", "--json", str(path)]
    assert main(command) == 0
    figures = json.loads(path.read_text())["gpu"]
    tiny = figures["models"]["tiny"]
    # 2 layers: norms 2*64, q and output 64*64, k and v 64*32, MLP 3*64*128; embedding not read but for the head
    weights = 2 * (2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 + 512 * 64
    token = 2 * 2 * 2 * 16  # K and V, layers, heads, head size
    assert [(d["batch"], d["weight_bytes"], d["kv_bytes"]) for d in tiny["decode"]] == [
        (1, 2 * weights, 2 * 64 * token),
        (4, 2 * weights, 2 * 4 * 64 * token),
    ]
    for step in tiny["decode"]:
        ideal = (step["weight_bytes"] + step["kv_bytes"]) / figures["bytes_per_second"]
        assert step["of_roofline"] == pytest.approx(ideal / step["seconds"])
    assert [k["kernel"] for k in tiny["kernels"]][:3] == ["kv_write", "decode_attention", "extend_attention"]
    assert tiny["kernels"][1]["bytes"] == 4 * 64 * 2 * 2 * 16 * 2
    overlap, normal = tiny["load"]
    assert overlap["tokens"] == normal["tokens"]
    assert 3 * 4 <= overlap["tokens"] <= 3 * 9
    out = capsys.readouterr().out
    assert out.count("| --- |") == 3
    assert "| batch | ms | roofline ms | of roofline |" in out


def test_wrong_arguments(capsys):
    for extra, message in (
        (["--config", "gpt"], "'gpt' is none of tiny, qwen3-0.6b"),
        (["--config", "qwen3-30b-a3b"], "'qwen3-30b-a3b' is none of tiny, qwen3-0.6b"),
        (["--shortest", "9999"], "9999"),
    ):
        with pytest.raises(SystemExit) as e:
            main(["bench", "gpu", *extra])
        assert e.value.code == 2
        assert message in capsys.readouterr().err
