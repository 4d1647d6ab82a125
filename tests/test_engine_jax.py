"""The engine over the checksum model on JAX: same answers for every schedule, no compiles, order with slow steps."""

import numpy as np
import pytest
from device.helpers import SlowModel
from helpers_engine import check_all_back, model_of, oracle
from jax import monitoring

from jaxoverlap.config import EngineConfig
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.models.checksum import ChecksumModel

CONTEXT = 128
TOTAL = 320
ROWS = 4
LOOPS = ["overlap", "normal"]


def params(n, **more):
    return {"max_new_tokens": n, "temperature": 0.0, **more}


def make_runner(model=None, **settings):
    config = EngineConfig(**{"model_path": "checksum", "max_running_requests": ROWS, **settings})
    runner = JaxRunner(model or ChecksumModel(), config, max_total_tokens=TOTAL, context_length=CONTEXT)
    runner.warm_up()
    return runner


def engine_on(runner, loop="overlap", max_total_tokens=TOTAL, **settings):
    """A fresh engine on a warm runner; its limits may be smaller than the runner's."""
    off = loop == "normal"
    settings = {"model_path": "checksum", "max_running_requests": ROWS, "random_seed": 0, "audit": True, **settings}
    config = EngineConfig(disable_overlap_schedule=off, **settings)
    return Engine.from_parts(config, model_of(module=ChecksumModel(), context_length=CONTEXT), runner, max_total_tokens)


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)], ids=["page1", "page4"])
def runner(request):
    runner = make_runner(page_size=request.param, chunked_prefill_size=32, poison_future_map=True)
    runner.page_size = request.param
    yield runner
    runner.shutdown()


def turn(engine):
    before = engine.metrics()["turns"]
    engine._loop.drive(lambda: engine.metrics()["turns"] > before)


def random_load(rng, longest_prompt, longest_output):
    """[(turn of arrival, prompt, params, turn of its abort or None, expected ids)]"""
    load = []
    shared = rng.integers(3, 900, 40).tolist()
    for _ in range(rng.integers(4, 10)):
        prompt = rng.integers(3, 900, rng.integers(1, longest_prompt + 1)).tolist()
        if rng.random() < 0.3:  # a prefix that others have too
            keep = int(rng.integers(1, 40))
            prompt = (shared[:keep] + prompt)[:longest_prompt]
        n = int(rng.integers(1, longest_output + 1))
        stops = ()
        if rng.random() < 0.5:  # ends at a known place
            whole = oracle(prompt, n)
            stops = (whole[int(rng.integers(0, n))],)
        more = {"temperature": 1.0} if rng.random() < 0.3 else {}  # its logits leave sampling no choice
        arrival = int(rng.integers(0, 25))
        abort = arrival + int(rng.integers(0, 20)) if rng.random() < 0.2 else None
        load.append((arrival, prompt, params(n, stop_token_ids=list(stops), **more), abort, oracle(prompt, n, stops)))
    return load


def run_load(engine, load):
    """Output ids of each request of the load, in the order given."""
    streams, results = {}, {}
    for now in range(45):
        for i, (arrival, prompt, sampling, abort, _) in enumerate(load):
            if arrival == now:
                streams[i] = engine.generate(input_ids=prompt, sampling_params=sampling, rid=str(i), stream=True)
            if abort == now:
                engine._scheduler.abort(str(i), exact=True)  # with the turn, not before it: the loop is not turned here
                engine._loop._poked = True
        turn(engine)
    for i, stream in streams.items():
        *_, results[i] = stream
    return [results[i] for i in range(len(load))]


SETTINGS = [
    {},
    {"max_running_requests": 2},
    {"enable_mixed_chunk": True},
    {"chunked_prefill_size": 8},
    {"schedule_policy": "lpm"},
    {"disable_radix_cache": True},
    {"disable_consecutive_prefill_overlap": True, "enable_mixed_chunk": True},
    {"max_total_tokens": 64, "init_new_token_ratio": 0.05, "retract_decode_steps": 2},
]
LENGTHS = {64: (8, 44)}  # prompt and output, by pool; outputs that outgrow the pool


def test_random_loads(runner):
    """tests/README.md H1 (c) and H3 among them: many prefills beside few slots, slots and pages reused at once."""
    retracted = aborted = 0
    for seed in range(100):
        settings = {"chunked_prefill_size": 32, "page_size": runner.page_size, **SETTINGS[seed % len(SETTINGS)]}
        total = settings.pop("max_total_tokens", TOTAL)
        load = random_load(np.random.default_rng(seed), *LENGTHS.get(total, (80, 20)))
        outputs = {}
        for loop in LOOPS:
            engine = engine_on(runner, loop, total, **settings)
            results = run_load(engine, load)
            for (_, _, _, abort, want), result in zip(load, results):
                got = result["output_ids"]
                if result["meta_info"]["finish_reason"]["type"] == "abort":
                    assert abort is not None
                    assert got == want[: len(got)], seed
                    aborted += 1
                else:
                    assert got == want, seed
            outputs[loop] = [r["output_ids"] for r, one in zip(results, load) if one[3] is None]
            retracted += engine.metrics()["retracted"]
            check_all_back(engine)
        assert outputs["overlap"] == outputs["normal"]
    assert retracted > 4
    assert aborted > 20


@pytest.mark.parametrize("loop", LOOPS)
def test_h1_relay_ring(runner, loop):
    """A's first token waits while others prefill: 40 short requests, or one long prompt in chunks."""
    for others in ([[7 + i, 9] for i in range(40)], [list(range(5, 85))]):
        engine = engine_on(runner, loop, page_size=runner.page_size, chunked_prefill_size=8)
        a = engine.generate(input_ids=[5, 6], sampling_params=params(8), stream=True)
        n = 1 if len(others) > 1 else 6
        rest = engine.generate(input_ids=others, sampling_params=params(n), stream=True)
        *_, last = a
        assert last["output_ids"] == oracle([5, 6], 8)
        got = {r["index"]: r["output_ids"] for r in rest}
        assert got == {i: oracle(p, n) for i, p in enumerate(others)}
        check_all_back(engine)


@pytest.mark.parametrize("loop", LOOPS)
def test_h3_recycle_in_flight(runner, loop):
    """B needs the pages that A gives back while the launch with A's last row still runs."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        a, b = rng.integers(3, 900, 20).tolist(), rng.integers(3, 900, 24).tolist()
        end = int(rng.integers(1, 12))
        stop = oracle(a, end)[-1]
        engine = engine_on(
            runner, loop, 48, page_size=runner.page_size, chunked_prefill_size=32, max_running_requests=1 + seed % 2
        )
        sampling = [params(12, stop_token_ids=[stop]), params(8)]
        results = engine.generate(input_ids=[a, b], sampling_params=sampling)
        assert results[0]["output_ids"] == oracle(a, 12, (stop,))
        assert results[1]["output_ids"] == oracle(b, 8)
        check_all_back(engine)


H14_LENGTHS = (1, 15, 16, 17, 20, 31, 32, 33, 40)


@pytest.mark.parametrize(
    ("budget", "chunk"), [(16, 32), (32, 16), (20, 64), pytest.param(20, -1, marks=pytest.mark.slow)]
)
def test_h14_bucket_budget(budget, chunk, caplog):
    """A chunk above the budget is shortened, with a warning at start-up; without chunks a lone prompt may be as long as
    the context."""
    config = {"max_prefill_tokens": budget, "chunked_prefill_size": chunk, "max_running_requests": 2}
    engine = Engine("checksum", context_length=CONTEXT, max_total_tokens=TOTAL, **config)
    assert ("max_prefill_tokens" in caplog.text) == (chunk > budget)
    largest = max(b.tokens for b in engine.runner.buckets.extend)
    assert largest == (CONTEXT if chunk == -1 else min(budget, chunk))
    with engine:
        prompts = [[3 + n] * n for n in H14_LENGTHS]
        for p in prompts:
            assert engine.generate(input_ids=p, sampling_params=params(3))["output_ids"] == oracle(p, 3)
        results = engine.generate(input_ids=prompts, sampling_params=params(3))
        assert [r["output_ids"] for r in results] == [oracle(p, 3) for p in prompts]


def mixed_requests(rng, count):
    prompts = [rng.integers(3, 900, rng.integers(1, 60)).tolist() for _ in range(count)]
    for i in range(3, count, 4):
        prompts[i] = prompts[i - 1][: len(prompts[i - 1]) // 2 + 1] + prompts[i][:20]  # prefix hits
    sampling = []
    for i in range(count):
        more = [
            {},
            {"temperature": 0.9, "top_k": 5},
            {"temperature": 1.3, "top_p": 0.8, "min_p": 0.1},
            {"sampling_seed": i},
        ]
        sampling.append({**params(int(rng.integers(1, 12))), **more[i % 4]})
    return prompts, sampling, [bool(i % 3 == 0) for i in range(count)]


def test_nothing_compiles_after_warm_up(runner):
    compiles = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        for loop in LOOPS:
            engine = engine_on(
                runner, loop, page_size=runner.page_size, chunked_prefill_size=32, enable_mixed_chunk=True
            )
            prompts, sampling, logprobs = mixed_requests(np.random.default_rng(1), 125)
            results = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=logprobs)
            for p, s, r in zip(prompts, sampling, results):
                assert r["output_ids"] == oracle(p, s["max_new_tokens"])
            for p, s in zip(prompts, sampling):
                stream = engine.generate(input_ids=p, sampling_params=s, stream=True)
                next(stream)
                if len(p) % 5 == 0:
                    stream.close()
            engine.abort(abort_all=True)
            check_all_back(engine)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert compiles == []


def test_logprobs_of_the_chosen_tokens(runner):
    engine = engine_on(runner, page_size=runner.page_size, chunked_prefill_size=32)
    result = engine.generate(input_ids=[5, 6], sampling_params=params(5), return_logprob=True)
    pairs = result["meta_info"]["output_token_logprobs"]
    assert [t for _, t, _ in pairs] == result["output_ids"] == oracle([5, 6], 5)
    assert [lp for lp, _, _ in pairs] == [0.0] * 5  # the checksum model is certain


class Spy:
    """Notes what the engine asks of a runner, and which steps were done when a launch returned."""

    def __init__(self, runner):
        self.runner = runner
        self.events = []
        self.handles = {}

    def launch(self, launches):
        handles = self.runner.launch(launches)
        self.handles[launches[0].number] = handles[0]
        running = [n for n, h in self.handles.items() if not self.runner.is_ready(h)]
        self.events.append(("launch", launches[0].number, running))
        return handles

    def wait(self, handle):
        result = self.runner.wait(handle)
        self.events.append(("wait", handle.launch.number, None))
        return result

    def block(self, handle):
        self.runner.block(handle)


@pytest.fixture(scope="module")
def slow_runner():
    runner = make_runner(SlowModel(turns=60), max_running_requests=2, chunked_prefill_size=8)
    yield runner
    runner.shutdown()


def test_the_host_works_while_a_slow_step_runs(slow_runner):
    """Order, not time: launch N + 1 returns while step N runs, and between launches N and N + 1 result N - 1 is
    processed (its text is with the caller)."""
    spy = Spy(slow_runner)
    engine = engine_on(spy, max_running_requests=2, chunked_prefill_size=8)
    for result in engine.generate(input_ids=[5, 6], sampling_params=params(8), stream=True):
        spy.events.append(("result", len(result["output_ids"]), None))
    launches = [e for e in spy.events if e[0] == "launch"]
    for _, number, running in launches[1:]:
        assert {number - 1, number} <= set(running), spy.events
    order = [(kind, n) for kind, n, _ in spy.events]
    for n in range(2, 8):
        between = order[order.index(("launch", n)) : order.index(("launch", n + 1))]
        assert between == [("launch", n), ("wait", n - 1), ("result", n - 1)]
    check_all_back(engine)


def test_the_normal_loop_waits_for_each_step(slow_runner):
    spy = Spy(slow_runner)
    engine = engine_on(spy, "normal", max_running_requests=2, chunked_prefill_size=8)
    assert engine.generate(input_ids=[5, 6], sampling_params=params(4))["output_ids"] == oracle([5, 6], 4)
    assert [(kind, n) for kind, n, _ in spy.events] == [(k, n) for n in range(1, 5) for k in ("launch", "wait")]


def test_h17_host_alias(slow_runner):
    """50 overlapped steps, each slow enough that the host has prepared the next before it reads its input."""
    engine = engine_on(slow_runner, max_running_requests=2, chunked_prefill_size=8)
    prompts = [[5, 6, 7], list(range(20, 32))]
    results = engine.generate(input_ids=prompts, sampling_params=[params(50), params(40)])
    assert [r["output_ids"] for r in results] == [oracle(prompts[0], 50), oracle(prompts[1], 40)]
    check_all_back(engine)


def test_a_trace_of_a_slow_engine(slow_runner):
    """Under overlap host work runs behind a step; in the normal loop only what follows the launch call does."""
    from jaxoverlap.trace.summary import summarize

    hidden = {}
    for loop in LOOPS:
        engine = engine_on(slow_runner, loop, max_running_requests=2, chunked_prefill_size=8)
        with engine.trace() as trace:
            engine.generate(input_ids=[5, 6], sampling_params=params(10))
        assert len(trace.device) == engine.metrics()["launches"]
        assert all(a.end <= b.begin for a, b in zip(trace.device, trace.device[1:]))
        hidden[loop] = summarize([trace])["hidden"]
    assert hidden["normal"] < hidden["overlap"]
