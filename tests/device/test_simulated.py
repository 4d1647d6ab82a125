"""The simulated device: the right tokens whatever the schedule, and time that runs as it says."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers_engine import check_all_back, oracle

from jaxoverlap import Engine, EngineConfig
from jaxoverlap.cli import main
from jaxoverlap.core import ForwardMode, Launch, Request, RequestError, Sample
from jaxoverlap.device.simulated import SimulatedRunner
from jaxoverlap.sampling_params import SamplingParams

NO_WRITES = np.empty((3, 0), np.int32)


def engine(**settings):
    settings = {"step_ms": 0.0, "max_running_requests": 4, "context_length": 128, "random_seed": 0, **settings}
    return Engine(device="simulated", audit=True, **settings)


class Watched:
    """Copies every array of a launch and compares when it is waited for."""

    def __init__(self, runner):
        self.runner, self.kept = runner, {}

    def __getattr__(self, name):
        return getattr(self.runner, name)

    @staticmethod
    def arrays(launch):
        names = ("slots", "epochs", "seq_lens", "extend_lens", "prefix_lens", "input_ids", "page_writes")
        return {n: getattr(launch, n) for n in names if getattr(launch, n) is not None}

    def launch(self, launches):
        self.kept[launches[0].number] = {n: a.copy() for n, a in self.arrays(launches[0]).items()}
        return self.runner.launch(launches)

    def wait(self, handle):
        now = self.arrays(handle.launch)
        for name, was in self.kept.pop(handle.launch.number).items():
            np.testing.assert_array_equal(now[name], was, err_msg=f"{name} was rewritten before its step was done")
        return self.runner.wait(handle)


def watched_engine(**settings):
    e = engine(**settings)
    watched = Watched(e.runner)
    return Engine.from_parts(e.config, e.model, watched, e.max_total_tokens)


@pytest.mark.parametrize("off", [False, True], ids=["overlap", "normal"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 4, "chunked_prefill_size": 8, "enable_mixed_chunk": True},
        {"max_total_tokens": 150, "chunked_prefill_size": 16, "init_new_token_ratio": 0.05},  # retracts
        {"disable_radix_cache": True, "chunked_prefill_size": -1},
    ],
)
def test_tokens_are_the_rules_and_launched_arrays_stay_as_they_were(settings, off):
    rng = np.random.default_rng(1)
    shared = rng.integers(3, 900, 40).tolist()
    prompts = [shared[: rng.integers(1, 40)] + rng.integers(3, 900, rng.integers(1, 30)).tolist() for _ in range(24)]
    expected = [oracle(p, 50) for p in prompts]
    stops = [e[int(rng.integers(5, 50))] for e in expected]
    params = [{"max_new_tokens": 50, "temperature": 0.0, "stop_token_ids": [s]} for s in stops]
    with watched_engine(disable_overlap_schedule=off, **settings) as e:
        results = e.generate(input_ids=prompts, sampling_params=params)
        for prompt, stop, result in zip(prompts, stops, results):
            assert result["output_ids"] == oracle(prompt, 50, (stop,))
        if "init_new_token_ratio" in settings:
            assert e.metrics()["retracted"] > 0
        check_all_back(e)


def test_logprobs_are_zero_and_only_where_asked():
    with engine() as e:
        r = e.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 3}, return_logprob=True)
        assert r["meta_info"]["output_token_logprobs"] == [(0.0, t, None) for t in oracle([5, 6], 3)]
        with pytest.raises(RequestError, match="top_logprobs_num needs the setting max_logprobs"):
            e.generate(input_ids=[5, 6], return_logprob=True, top_logprobs_num=1)


def test_it_runs_without_jax_and_without_a_model():
    probe = (
        "import sys; sys.modules['jax'] = sys.modules['flax'] = None\n"
        "from jaxoverlap.cli import main\n"
        "sys.exit(main('generate --device simulated --step-ms 0 --input-ids 5,6,7 --max-new-tokens 4'.split()))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(t) for t in oracle([5, 6, 7], 4)]


def test_compare_on_it(capsys):
    argv = "compare --device simulated --step-ms 1 --batch 3 --max-new-tokens 6 --repeats 1 --json -"
    assert main(argv.split()) == 0
    out = capsys.readouterr().out
    assert '"device": "simulated device, 1 ms a step"' in out
    assert '"tokens_equal": true' in out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_ms": 3.0}, "step_ms needs device simulated"),
        ({"step_jitter": 0.5}, "step_jitter needs device simulated"),
        ({"device": "simulated", "step_ms": -1.0}, "step_ms must be at least 0"),
        ({"device": "simulated", "prefill_step_ms": float("nan")}, "prefill_step_ms must be"),
        ({"device": "simulated", "step_jitter": 1.0}, "step_jitter must be at least 0 and below 1"),
        ({"device": "simulated", "model_path": "smollm2-135m"}, "model_path must be checksum"),
        ({"device": "simulated", "dtype": "float32"}, "dtype means nothing on device simulated"),
        ({"device": "simulated", "poison_future_map": True}, "poison_future_map means nothing"),
        ({"device": "simulated", "max_logprobs": 1}, "max_logprobs means nothing"),
        ({"max_logprobs": -1}, "max_logprobs must be at least 0, not -1"),
        ({"device": "tpu"}, "device must be one of auto, simulated"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize("params", [{"frequency_penalty": 1.0}, {"logit_bias": {"5": 1.0}}, {"min_new_tokens": 2}])
def test_what_changes_logits_is_refused_where_there_are_none(params):
    with engine() as e, pytest.raises(RequestError, match=f"{next(iter(params))} means nothing on a device without"):
        e.generate(input_ids=[1, 2], sampling_params=params)


def test_the_model_that_auto_means():
    assert EngineConfig().model_path == "smollm2-135m"
    assert EngineConfig(device="simulated").model_path == "checksum"


# the runner alone


def times(r, handle):
    (span,) = r.device_spans(handle)
    assert span[0] == "step"
    return span[1:]


def runner(**settings):
    config = EngineConfig(device="simulated", max_running_requests=2, **settings)
    return SimulatedRunner(config, max_total_tokens=64, context_length=32)


def request(rid="a"):
    return Request(rid, np.array([5, 6], np.int32), SamplingParams())


def prefill(number=1, slot=1, pages=(3, 4, 5, 6, 7, 8), **more):
    n = len(pages)
    writes = np.array([[slot] * n, range(n), pages], np.int32)
    return Launch(
        number=number, mode=ForwardMode.EXTEND, requests=[request()], slots=np.array([slot]),
        epochs=np.zeros(1, np.int64), seq_lens=np.array([2]), extend_lens=np.array([2]), prefix_lens=np.array([0]),
        input_ids=np.array([5, 6], np.int32), num_decoding=0, page_writes=writes, **more,
    )  # fmt: skip


def decode(number, seq_len, slot=1, **more):
    return Launch(
        number=number, mode=ForwardMode.DECODE, requests=[request()], slots=np.array([slot]),
        epochs=np.zeros(1, np.int64), seq_lens=np.array([seq_len]), extend_lens=None, prefix_lens=None, input_ids=None,
        num_decoding=0, page_writes=NO_WRITES, **more,
    )  # fmt: skip


def test_a_step_begins_at_its_launch_or_behind_the_step_before():
    r = runner(step_ms=20.0, prefill_step_ms=30.0)
    before = time.perf_counter()
    (a,) = r.launch([prefill()])
    (b,) = r.launch([decode(2, 3)])
    between = time.perf_counter()
    assert before <= times(r, a)[0] <= between
    assert times(r, a)[1] - times(r, a)[0] == pytest.approx(0.030)
    assert times(r, b) == pytest.approx((times(r, a)[1], times(r, a)[1] + 0.020))
    assert r.wait(b).tokens.tolist() == oracle([5, 6], 2)[1:]
    assert time.perf_counter() >= times(r, b)[1]
    assert r.is_ready(b)
    assert r.wait(a).tokens.tolist() == oracle([5, 6], 1)
    launched = time.perf_counter()
    (c,) = r.launch([decode(3, 4)])
    assert times(r, c)[0] >= launched  # the device had been idle


def test_a_wait_lets_other_threads_run():
    r = runner(step_ms=200.0)
    (h,) = r.launch([prefill()])
    done = threading.Event()
    threading.Thread(target=done.set).start()
    assert not r.is_ready(h)
    r.wait(h)
    assert done.is_set()


def test_jitter_stays_in_its_bounds_and_differs():
    r = runner(step_ms=10.0, step_jitter=0.5, random_seed=1)
    spent = [np.subtract(*times(r, r.launch([prefill(i)])[0])[::-1]) for i in range(50)]
    assert len(set(spent)) > 40
    assert min(spent) >= 0.005 - 1e-9
    assert max(spent) <= 0.015 + 1e-9


def test_delayed_sampling_holds_the_device_and_obeys_the_mask():
    r = runner(step_ms=0.0)
    (a,) = r.launch([prefill(delay_sample=True)])
    assert not r.is_ready(a)
    with pytest.raises(ValueError, match="launch 1 waits for its sampling"):
        r.wait(a)
    asked = time.perf_counter()
    natural = oracle([5, 6], 1)[0]
    allowed = (natural + 5) % 1000
    mask = np.zeros((1, 1, 32), np.int32)
    for t in (natural - 1, allowed):
        mask[0, 0, t // 32] |= np.array(1 << t % 32, np.uint32).view(np.int32)
    r.sample([Sample(a.launch, a, mask)])
    (_, begin, done), (_, sampled, end) = r.device_spans(a)
    assert begin == done <= asked <= sampled == end
    assert r.wait(a).tokens.tolist() == [allowed]
    (b,) = r.launch([decode(2, 3)])
    assert r.wait(b).tokens.tolist() == oracle([5, 6, allowed], 1)
    with pytest.raises(ValueError, match="sampled already"):
        r.sample([Sample(a.launch, a, mask)])


def test_a_place_that_nobody_wrote_is_an_error():
    r = runner(step_ms=0.0)
    (a,) = r.launch([decode(7, 5)])
    with pytest.raises(RuntimeError, match="launch 7: a row read a position"):
        r.wait(a)
