"""The benches run as their commands say, and their figures hang together. No time is asserted."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_models import make_hf_dir

from jaxoverlap import Engine
from jaxoverlap.bench import offline
from jaxoverlap.bench.fused import FusedDecode
from jaxoverlap.bench.host import PARTS, STEP_MS
from jaxoverlap.bench.load import Load
from jaxoverlap.cli import main
from jaxoverlap.config import EngineConfig
from jaxoverlap.device.simulated import SimulatedRunner
from jaxoverlap.driver import Driver
from jaxoverlap.models.decoder import Decoder
from jaxoverlap.models.shapes import published


def run(capsys, command):
    assert main(f"bench {command} --json -".split()) == 0
    return json.loads(capsys.readouterr().out)


def test_host(capsys):
    data = run(capsys, "host --batch 1,5 --waiting 7 --turns 40")["host"]
    assert list(data) == ["1", "5"]
    for x in data.values():
        assert list(x["parts_us"]) == list(PARTS)
        assert sum(x["parts_us"].values()) == pytest.approx(x["turn_us"])
        assert x["turn_us_p10"] <= x["turn_us"] <= x["turn_us_p90"]
        assert x["turn_us_none_waiting"] > 0
        assert x["waiting"] == 7
        assert x["traced_step"]["step_ms"] == STEP_MS
        assert x["traced_step"]["ratio"] > 0
    assert data["1"]["of_sglang"] == [data["1"]["turn_us"] / 690, data["1"]["turn_us"] / 400]
    assert "of_sglang" not in data["5"]


def test_host_table_says_what_it_measured(capsys):
    assert main(["bench", "host", "--batch", "2", "--turns", "20"]) == 0
    out = capsys.readouterr().out
    assert "compose" in out
    assert "batch 2: tracing adds" in out


def test_overlap(capsys):
    rows = run(capsys, "overlap --step-ms 1 --ratios 0.5,2 --turns 16")["overlap"]
    assert len(rows) == 2
    for x in rows:
        assert {"host_ms", "device_ms", "normal_ms", "overlap_ms", "hidden"} <= x.keys()
        saved = x["normal_ms"] - x["overlap_ms"]
        assert x["hidden"] == pytest.approx(saved / min(x["host_ms"], x["device_ms"]))
        assert x["of_bound"] == pytest.approx(x["overlap_ms"] / max(x["host_ms"], x["device_ms"]))
        assert x["normal_ms"] - x["host_ms"] > 0.5 * x["device_ms"]  # what was waited is not the host's work
    assert rows[1]["host_ms"] >= 2  # the busy loop lasts at least as long as it is told to


def test_dp(capsys):
    rows = run(capsys, "dp --ranks 2,3 --step-ms 2 --turns 16")["dp"]
    assert [(x["ranks"], x["form"]) for x in rows] == [(n, form) for n in (2, 3) for form in ("host", "accelerator")]
    for x in rows:
        assert x["alone_us"] > 0
        assert x["hidden"] == pytest.approx(1 - (x["overlap_ms"] - x["device_ms"]) / x["host_ms"])


def test_dp_of_one_rank_is_refused(capsys):
    assert main(["bench", "dp", "--ranks", "1,2"]) == 2
    assert "--ranks must be 2 to 64, not 1" in capsys.readouterr().err


def test_launch(capsys):
    data = run(capsys, "launch --model checksum --batch 2 --turns 5 --skip-warmup")["launch"]
    assert data["model"] == "checksum"
    x = data["batches"]["2"]
    assert x["leaves"] == 0
    assert x["ratio"] == x["launch_us"] / x["bare_jit_us"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_hf_dir(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_offline(capsys, tiny):
    flags = "--batch 2 --requests 5 --turns 6 --skip-warmup --dtype float32"
    x = run(capsys, f"offline --model {tiny} {flags}")["offline"]["batches"]["2"]
    load = offline.arrivals(5, 0.1, 248)
    assert x["requests"] == 5
    assert x["prompt_tokens"] == sum(a.prompt for a in load)
    assert x["output_tokens"] == sum(a.output for a in load)
    for name in ("step_ms", "hand_written_ms", "ttft_ms", "tpot_ms"):
        assert 0 < x[name]["p50"] <= x[name]["p90"]
    assert len(x["ratios"]) == offline.ROUNDS
    assert x["ratio"] == np.median(x["ratios"])
    assert min(x["ratios"]) > 0
    assert len(x["traced"]) == offline.ROUNDS
    assert x["traced_ratio"] == np.median(x["traced"])
    assert min(x["traced"]) > 0


@pytest.mark.soak
def test_grammar_share(capsys, tiny):
    flags = "--batch 2 --turns 8 --grammar-share 0,0.5,1 --skip-warmup --dtype float32"
    rows = run(capsys, f"offline --model {tiny} {flags}")["offline"]["grammars"]
    assert [(x["batch"], x["share"], x["constrained"]) for x in rows] == [(2, 0.0, 0), (2, 0.5, 1), (2, 1.0, 2)]
    for x in rows:
        assert x["tokens_equal"]
        normal, overlap, needed = (x["loops"][loop] for loop in ("normal", "overlap", "when-needed"))
        assert normal["delayed"] == normal["not_delayed"] == overlap["not_delayed"] == 0
        assert overlap["delayed"] == needed["delayed"] + needed["not_delayed"]
        assert (overlap["delayed"] > 0) == (x["constrained"] > 0)
        assert (overlap["mask_ms"] > 0) == (x["constrained"] > 0)
        for loop in (normal, overlap, needed):
            assert 0 < loop["step_ms"]["p50"] <= loop["step_ms"]["p90"]
            assert loop["idle_ms"] >= 0


BIASED = {"attention_bias": True, "tie_word_embeddings": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize("more", [BIASED, QWEN3])
def test_the_hand_written_step_decodes_what_the_engine_does(tmp_path, more):
    directory = make_hf_dir(tmp_path, **more)
    prompts = [[5, 9, 33, 70], [100, 7, 8, 1]]
    settings = {"max_running_requests": 2, "context_length": 64, "max_total_tokens": 128, "skip_warmup": True}
    with Engine(str(directory), dtype="float32", **settings) as engine:
        params = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        expected = [r["output_ids"] for r in engine.generate(input_ids=prompts, sampling_params=params)]
        fused = FusedDecode(engine.model.module, 2, 20)
        caches = fused.empty_caches()
        for position, column in enumerate(np.array(prompts, np.int32).T):
            caches, tokens, _ = fused.step(caches, jnp.asarray(column), jnp.int32(position))
        got = [tokens]
        for position in range(4, 15):
            caches, tokens, after = fused.step(caches, tokens, jnp.int32(position))
            assert after == position + 1
            got.append(tokens)
    assert np.array(got).T.tolist() == expected


def test_the_hand_written_step_has_no_experts():
    model = nnx.eval_shape(lambda: Decoder(published("tiny-moe")))
    with pytest.raises(ValueError, match=r"computes no mixture of experts \(num_experts 8\)"):
        FusedDecode(model, 2, 20)


def test_arrivals_are_the_recorded_ones_scaled():
    load = offline.arrivals(3, 0.5, 1000)
    assert [(a.prompt, a.output) for a in load] == [(187, 22), (198, 54), (440, 28)]
    assert [a.seconds for a in load] == [0.0, 4.315, 4.542]
    assert all(a.prompt + a.output <= 40 and a.output >= 2 <= a.prompt for a in offline.arrivals(512, 1.0, 40))
    assert len(offline.arrivals(512, 1.0, 40)) == 512
    spread = offline.spread(load, rate=4.0)
    assert [a.seconds for a in spread] == pytest.approx([0.0, 0.5 * 4.315 / 4.542, 0.5])


def test_a_load_that_never_decodes_says_so():
    config = EngineConfig(device="simulated", step_ms=0.0, max_running_requests=1, max_total_tokens=64)
    runner = SimulatedRunner(config, max_total_tokens=64, context_length=64)
    more = {"context_length": 64, "vocab_size": 1000, "count": 2, "prompt_len": 4, "max_new_tokens": 4}
    load = Load(config, Driver(runner), ignore_eos=True, **more)
    with pytest.raises(RuntimeError, match="not 2"):
        load.turn_until_decoding(2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("host --turns 5000", "--turns must be at most"),
        ("host --turns 9", "--turns must be at least 10"),
        ("host --batch 20000", "--batch must be at most 16384, not 20000"),
        ("host --waiting 1000001", "--waiting must be at most 1000000"),
        ("overlap --turns 3", "--turns must be at least 4"),
        ("overlap --step-ms 1e300", "--step-ms must be at most 10000"),
        ("overlap --ratios 1,1e308", "--ratios must be at most 100"),
        ("dp --turns 1", "--turns must be at least 4"),
        ("compose --turns 1", "--turns must be at least 4"),
        ("compose --turns 999999999999999999999", "--turns must be at most 100000"),
        ("launch --model checksum --batch 1 --turns 5 --max-total-tokens 10", "max_total_tokens must be at least 37"),
        (f"compose --json {'x' * 300}", "--json: 'xxx"),
        ("host --batch 0", "'0' must be an int of at least 1"),
        ("host --waiting=-1", "'-1' must be an int of at least 0"),
        ("overlap --ratios 0.5,x", "'x' must be a number above 0"),
        ("overlap --step-ms 0", "'0' must be a number above 0"),
        ("offline --turns 3", "--turns must be at least 4"),
        ("offline --requests 513", "--requests must be at most 512"),
        ("offline --scale 1e308", "--scale must be at most 1000"),
        ("offline --load 1e-12", "--load must be at least 0.01"),
        ("offline --load 1001", "--load must be at most 1000"),
        ("offline --batch 16385", "--batch must be at most 16384"),
        ("launch --batch 1,16385", "--batch must be at most 16384"),
        ("offline --model checksum --max-total-tokens 4000 --context-length 20", "context_length must be at least"),
        ("launch --model checksum --json /no/such/x.json", "--json"),
        ("launch --step-ms 3", "unrecognized arguments"),
        ("offline --grammar-share 0.5,2", "'0.5,2' must be numbers from 0 to 1"),
        ("offline --model checksum --grammar-share 1 --skip-warmup", "--grammar-share needs"),
    ],
)
def test_mistakes_are_usage_errors(capsys, command, message):
    try:
        code = main(f"bench {command}".split())
    except SystemExit as e:
        code = e.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_offline_needs_weights(capsys):
    assert main(["bench", "offline", "--model", "checksum", "--batch", "1", "--skip-warmup"]) == 1
    assert "bench offline needs a decoder with weights, not checksum" in capsys.readouterr().err
