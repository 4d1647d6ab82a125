"""Grammars through the engine, on the JAX runner with the checksum model over bytes. Expected tokens come from a loop
of one request that holds nothing but a fresh grammar state and the checksum rule."""

import json
import threading
import time
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from helpers_engine import SeeingDriver, byte_level_tokenizer, check_all_back
from helpers_grammar import END, allowed, byte_backend, grammar

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, RequestError, Sample
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.grammar.backend import LLGrammar
from jaxoverlap.models.checksum import ChecksumConfig, ChecksumModel
from jaxoverlap.trace.bubbles import bubbles, idle_time

CONTEXT, TOTAL, ROWS = 160, 480, 4
MODEL = ChecksumConfig(vocab_size=272, offset=32, span=95, eos_token_ids=(END,))  # printable characters
LOOPS = {
    "normal": {"disable_overlap_schedule": True},
    "overlap": {},
    "when-needed": {"delay_sampling": "when-needed"},
}
SCHEMA = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["brand", "n"],
    "additionalProperties": False,
}
GRAMMARS = [
    {"json_schema": json.dumps(SCHEMA)},
    {"json_schema": '{"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}'},
    {"regex": "(yes|no|maybe)"},
    {"regex": "[a-z]{2,8}"},
    {"ebnf": 'root ::= "call(" [a-z]+ ")"'},
    {"regex": "start of a long forced run: [0-9]{2}"},
    {"regex": "[a-z ]{20,40}"},
    {"regex": "[a-z ]{30,40}"},
]


@pytest.fixture(scope="module")
def backend():
    backend = byte_backend()
    yield backend
    backend.shutdown()


@pytest.fixture(scope="module")
def runner():
    config = EngineConfig(model_path="checksum", max_running_requests=ROWS, chunked_prefill_size=32)
    module = ChecksumModel(MODEL)
    runner = JaxRunner(module, config, max_total_tokens=TOTAL, context_length=CONTEXT, cut=True)
    runner.warm_up()
    yield runner
    runner.shutdown()


def engine_on(runner, backend, loop="overlap", max_total_tokens=TOTAL, **settings):
    fields = {"model_path": "checksum", "max_running_requests": ROWS, "chunked_prefill_size": 32, "audit": True}
    config = EngineConfig(**{**fields, "random_seed": 0, **LOOPS[loop], **settings})
    model = SimpleNamespace(
        name="test",
        config=MODEL,
        tokenizer=byte_level_tokenizer(),
        context_length=CONTEXT,
        sampling_defaults={},
    )
    return Engine.from_parts(config, model, runner, max_total_tokens, grammar_backend=backend)


def params(n=40, **more):
    return {"max_new_tokens": n, "temperature": 0.0, **more}


def expected(backend, prompt, sampling):
    """Token by token, with no scheduler: the rule's token, or the nearest allowed one upwards (cyclic)."""
    given = next(((kind, sampling[kind]) for kind in ("json_schema", "regex", "ebnf") if kind in sampling), None)
    state = None if given is None else grammar(backend, *given)
    out = []
    while len(out) < sampling["max_new_tokens"] and (state is None or not state.is_terminated()):
        token = MODEL.next_token([*prompt, *out])
        if state is not None:
            token = min(allowed(backend, state), key=lambda t: (t - token) % MODEL.vocab_size)
            state.accept_token(token)
        out.append(token)
    return out


def turn(engine):
    before = engine.metrics()["turns"]
    engine._loop.drive(lambda: engine.metrics()["turns"] > before)


def check_ended(sampling, result):
    """What a grammar's output must be, however it ended."""
    reason = result["meta_info"]["finish_reason"]
    assert reason["type"] in ("stop", "length")
    if reason["type"] == "stop" and "json_schema" in sampling:
        jsonschema.validate(json.loads(result["text"]), json.loads(sampling["json_schema"]))


# Random loads: both loops and the one that delays only when needed.


def random_load(rng, longest_prompt, longest_output):
    """[(turn of arrival, prompt, params, turn of its abort or None)]"""
    load, shared = [], rng.integers(40, 120, 40).tolist()
    for _ in range(rng.integers(4, 9)):
        prompt = rng.integers(40, 120, rng.integers(1, longest_prompt + 1)).tolist()
        if rng.random() < 0.3:
            prompt = (shared[: int(rng.integers(1, 40))] + prompt)[:longest_prompt]
        more = GRAMMARS[int(rng.integers(len(GRAMMARS)))] if rng.random() < 0.6 else {}
        arrival = int(rng.integers(0, 20))
        abort = arrival + int(rng.integers(0, 15)) if rng.random() < 0.15 else None
        load.append((arrival, prompt, params(int(rng.integers(1, longest_output + 1)), **more), abort))
    return load


def run_load(engine, load):
    streams, results = {}, {}
    for now in range(40):
        for i, (arrival, prompt, sampling, abort) in enumerate(load):
            if arrival == now:
                streams[i] = engine.generate(input_ids=prompt, sampling_params=sampling, rid=str(i), stream=True)
            if abort == now:
                engine._scheduler.abort(str(i), exact=True)
                engine._loop._poked = True
        turn(engine)
    for i, stream in streams.items():
        *_, results[i] = stream
    return [results[i] for i in range(len(load))]


SETTINGS = [
    {},
    {"chunked_prefill_size": 8},
    {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
    {"max_total_tokens": 64, "init_new_token_ratio": 0.05, "retract_decode_steps": 2},
    {"max_total_tokens": 64, "init_new_token_ratio": 0.05, "enable_mixed_chunk": True, "chunked_prefill_size": 8},
    {"disable_radix_cache": True, "schedule_policy": "lof"},
    {"disable_consecutive_prefill_overlap": True, "enable_mixed_chunk": True},
    {"overrun": "skip-known", "max_running_requests": 2},
]


def test_random_loads(runner, backend):
    totals = {
        loop: dict.fromkeys(("retracted", "aborted", "sampling_delayed", "sampling_not_delayed"), 0) for loop in LOOPS
    }
    for seed in range(64):
        settings = dict(SETTINGS[seed % len(SETTINGS)])
        total = settings.pop("max_total_tokens", TOTAL)
        load = random_load(np.random.default_rng(seed), *((8, 44) if total < TOTAL else (60, 30)))
        for loop in LOOPS:
            engine = engine_on(runner, backend, loop, total, **settings)
            for (_, prompt, sampling, abort), result in zip(load, run_load(engine, load)):
                want, got = expected(backend, prompt, sampling), result["output_ids"]
                if result["meta_info"]["finish_reason"]["type"] == "abort":
                    assert abort is not None, (seed, loop, result)
                    assert got == want[: len(got)], (seed, loop)
                else:
                    assert got == want, (seed, loop, sampling)
                    check_ended(sampling, result)
            engine.wait_idle()
            for name in totals[loop]:
                totals[loop][name] += engine.metrics()[name]
            check_all_back(engine)
    assert all(totals[loop]["retracted"] > 5 for loop in LOOPS)
    assert totals["normal"]["sampling_delayed"] == totals["overlap"]["sampling_not_delayed"] == 0
    assert totals["when-needed"]["sampling_not_delayed"] > 100
    assert 0 < totals["when-needed"]["sampling_delayed"] < totals["overlap"]["sampling_delayed"]


# The order of things: a mask is made when every token before it was accepted, never earlier.


class Watcher(SeeingDriver):
    """Checks each mask as it comes: the grammar has taken what stands before the token that the mask is for."""

    def __init__(self, runner, accepted, early=False):
        super().__init__(runner, self.see)
        self.accepted, self.early = accepted, early
        self.late = self.at_launch = 0

    def see(self, ask):
        if type(ask) is Sample:
            self.late += self.check(ask.launch)
        elif type(ask) is Launch and ask.mask is not None:
            self.at_launch += 1 if self.early else self.check(ask)

    def check(self, launch):
        rows = 0
        for i, r in enumerate(launch.requests):
            if r.grammar is not None and not r.finished and r is not launch.chunked:
                assert self.accepted[id(r.grammar)] == launch.seq_lens[i] - r.prompt_len
                rows += 1
        return rows


@pytest.mark.parametrize("loop", LOOPS)
def test_masks_are_never_built_from_a_stale_state(monkeypatch, runner, backend, loop):
    accepted, accept, keep = {}, LLGrammar.accept_token, []

    def init(self, matcher):
        self.matcher = matcher
        accepted[id(self)] = 0
        keep.append(self)  # so that no other gets its id

    def count(self, token):
        accept(self, token)
        accepted[id(self)] += 1

    monkeypatch.setattr(LLGrammar, "__init__", init)
    monkeypatch.setattr(LLGrammar, "accept_token", count)
    settings = {"init_new_token_ratio": 0.05, "retract_decode_steps": 2, "chunked_prefill_size": 8}
    engine = engine_on(runner, backend, loop, max_total_tokens=80, **settings)
    watcher = engine._loop.driver = Watcher(runner, accepted, early=loop == "when-needed")
    prompts = [[40 + i] * (5 + 2 * i) for i in range(8)]
    sampling = [params(40, **GRAMMARS[-1 - i]) for i in range(8)]
    results = engine.generate(input_ids=prompts, sampling_params=sampling)
    for prompt, one, result in zip(prompts, sampling, results):
        assert result["output_ids"] == expected(backend, prompt, one)
    assert engine.metrics()["retracted"] > 0
    assert (watcher.late > 0) == (loop != "normal")
    assert (watcher.at_launch > 0) == (loop != "overlap")


def test_the_late_sampling_is_launched_behind_the_result_before(runner, backend):
    """Launch N, wait for N-1, sample N: and N+1 is launched before N is waited for, its token read on the device."""
    asked = []

    def see(ask):
        asked.append((type(ask).__name__, (ask if type(ask) is Launch else ask.launch).number))

    engine = engine_on(runner, backend)
    grammar(backend, "regex", "[a-z]{8}")
    engine._loop.driver = SeeingDriver(runner, see)
    result = engine.generate(input_ids=[50], sampling_params=params(20, regex="[a-z]{8}"))
    engine.wait_idle()
    assert result["output_ids"] == expected(backend, [50], params(20, regex="[a-z]{8}"))
    assert asked[:2] == [("Launch", 1), ("Sample", 1)]
    for n in range(2, 9):
        at = 3 * (n - 1) - 1
        assert asked[at : at + 3] == [("Launch", n), ("Wait", n - 1), ("Sample", n)]


def test_a_forced_run_is_not_delayed(runner, backend):
    """29 forced characters and two digits: every token but those behind a digit has its mask known."""
    text = "0123456789012345678901234567: [0-9]{2}"
    sampling = params(60, regex=text)
    outputs = {}
    for loop in ("overlap", "when-needed"):
        engine = engine_on(runner, backend, loop)
        outputs[loop] = engine.generate(input_ids=[50], sampling_params=sampling)["output_ids"]
        engine.wait_idle()
        m = engine.metrics()
        if loop == "overlap":
            assert m["sampling_not_delayed"] == 0
        else:
            # the mask of the second digit, and the overrun behind it, need the token in flight
            assert m["sampling_delayed"] == 2
            assert m["sampling_not_delayed"] == len(outputs[loop]) - 1
    assert outputs["overlap"] == outputs["when-needed"] == expected(backend, [50], sampling)


def test_no_compile_in_service(runner, backend):
    before = runner.compiles
    engine = engine_on(runner, backend)
    engine.generate(input_ids=[[50], [60, 61]], sampling_params=[params(5, regex="[ab]+"), params(5)])
    engine.wait_idle()
    assert runner.compiles == before


# How requests end.


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_behind_the_end(runner, backend, loop):
    engine = engine_on(runner, backend, loop)
    result = engine.generate(input_ids=[50], sampling_params=params(regex="abc"))
    assert result["text"] == "abc"
    assert result["meta_info"]["finish_reason"] == {"type": "stop"}
    assert result["meta_info"]["completion_tokens"] == 3


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_of_sequence_where_the_output_may_end(runner, backend, ignore_eos):
    engine = engine_on(runner, backend)
    prompt = next([p] for p in range(40, 120) if expected(backend, [p], params(regex="[ -9]*"))[-1] == END)
    result = engine.generate(input_ids=prompt, sampling_params=params(regex="[ -9]*", ignore_eos=ignore_eos))
    assert result["output_ids"] == expected(backend, prompt, params(regex="[ -9]*"))
    assert result["meta_info"]["finish_reason"] == {"type": "stop", **({} if ignore_eos else {"matched": END})}
    assert result["text"] == "".join(map(chr, result["output_ids"][:-1]))


@pytest.mark.parametrize(("order", "reason"), [("sglang", "length"), ("stop-first", "stop")])
def test_a_grammar_that_ends_at_the_cap(runner, backend, order, reason):
    engine = engine_on(runner, backend, finish_order=order)
    result = engine.generate(input_ids=[50], sampling_params=params(3, regex="abc"))
    assert (result["text"], result["meta_info"]["finish_reason"]["type"]) == ("abc", reason)


def test_a_refused_token_ends_its_request_alone_and_is_not_shown(monkeypatch, runner, backend):
    """As if the mask had not been applied: the tokens are the model's own."""
    engine = engine_on(runner, backend)
    monkeypatch.setattr(backend, "fill_masks", lambda rows, words: None)
    results = engine.generate(input_ids=[[50], [60, 61]], sampling_params=[params(regex="[\n]+"), params(9)])
    assert results[0]["output_ids"] == []
    reason = results[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    assert "the grammar refused a token" in reason["message"]
    assert "min_new_tokens" not in reason["message"]
    assert results[1]["output_ids"] == expected(backend, [60, 61], params(9))
    check_all_back(engine)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_minimum_that_leaves_the_grammar_no_token_is_named(runner, backend, loop):
    """The grammar allows but stop tokens, of which none may come yet."""
    engine = engine_on(runner, backend, loop)
    no_stop = {"stop_token_ids": list(b"yn"), "min_new_tokens": 4}
    sampling = [params(regex="a(yes|no)", **no_stop), params(9), params(regex="a(yes|no)", stop_token_ids=list(b"yn"))]
    results = engine.generate(input_ids=[[50], [60, 61], [50]], sampling_params=sampling)
    assert results[0]["text"] == "a"
    reason = results[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    assert "the grammar refused a token" in reason["message"]
    assert "token 2 may be no stop token, for min_new_tokens is 4" in reason["message"]
    assert results[1]["output_ids"] == expected(backend, [60, 61], params(9))
    assert results[2]["meta_info"]["finish_reason"]["type"] == "stop"
    check_all_back(engine)


@pytest.mark.parametrize("order", range(4))
def test_h8_free_rows_beside_a_constrained_one(runner, backend, order):
    """In every place of the batch, the constrained one ending first, then a free one in the middle; then a prefill."""
    sampling = [params(30), params(12), params(24)]
    sampling.insert(order, params(40, regex="[a-z]{6}"))
    prompts = [[50 + i, 60] for i in range(4)]
    for loop in LOOPS:
        engine = engine_on(runner, backend, loop, max_running_requests=4, enable_mixed_chunk=True)
        prompts = [*prompts[:4], list(range(40, 100))]
        results = engine.generate(input_ids=prompts, sampling_params=[*sampling, params(8)])
        for prompt, one, result in zip(prompts, [*sampling, params(8)], results):
            assert result["output_ids"] == expected(backend, prompt, one)


def test_h7_eight_at_once(runner, backend):
    outputs = {}
    for loop in LOOPS:
        engine = engine_on(runner, backend, loop, chunked_prefill_size=8)
        sampling = params(60, json_schema=SCHEMA)
        results = engine.generate(input_ids=[[45 + i] * (i + 1) for i in range(8)], sampling_params=sampling)
        for result in results:
            assert result["meta_info"]["finish_reason"]["type"] == "stop"
            jsonschema.validate(json.loads(result["text"]), SCHEMA)
        outputs[loop] = [result["output_ids"] for result in results]
    assert outputs["normal"] == outputs["overlap"] == outputs["when-needed"]


def test_response_format(runner, backend):
    engine = engine_on(runner, backend)
    formats = [{"type": "json_schema", "json_schema": {"schema": SCHEMA}}, None, {"type": "text"}]
    results = engine.generate(input_ids=[[50], [60], [70]], sampling_params=params(50), response_format=formats)
    jsonschema.validate(json.loads(results[0]["text"]), SCHEMA)
    for prompt, result in zip(([60], [70]), results[1:]):
        assert result["output_ids"] == expected(backend, prompt, params(50))
    with pytest.raises(RequestError, match="response_format: only one grammar at a time"):
        engine.generate(input_ids=[5], sampling_params=params(regex="a"), response_format=formats[0])
    with pytest.raises(RequestError, match="response_format has 3 entries for 1"):
        engine.generate(input_ids=[[5]], response_format=formats)


# Bad grammars, slow ones, and those nobody waits for any more.

BAD = [
    ({"json_schema": '{"type": "objec"}'}, "Invalid type: objec"),
    ({"json_schema": "not JSON"}, "not JSON"),
    ({"json_schema": '{"$ref": "#/nothing"}'}, "does not exist"),
    ({"json_schema": '{"$ref": "#"}'}, "allows no output"),
    ({"regex": "["}, "unclosed"),
    ({"ebnf": "root ::= nothing"}, "not found"),
    ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
]


def test_h10_a_bad_grammar_ends_its_one_request(runner, backend):
    for loop in LOOPS:
        engine = engine_on(runner, backend, loop)
        sampling = [params(20), *(params(20, **bad) for bad, _ in BAD), params(20, regex="[a-z]{5}")]
        prompts = [[50 + i, 61] for i in range(len(sampling))]
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        for (_, part), result in zip(BAD, results[1:-1]):
            reason = result["meta_info"]["finish_reason"]
            assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 400, "BadRequestError")
            assert part in reason["message"]
        for i in (0, -1):
            assert results[i]["output_ids"] == expected(backend, prompts[i], sampling[i])
        check_all_back(engine)
    with pytest.raises(RequestError, match="unclosed"):
        engine.generate(input_ids=[5], sampling_params=params(regex="["))


@pytest.fixture
def slow_backend(monkeypatch):
    """One that compiles when `go` is set."""
    backend, go = byte_backend(), threading.Event()
    compile_one = backend._compile

    def wait(key):
        go.wait()
        return compile_one(key)

    monkeypatch.setattr(backend, "_compile", wait)
    yield backend, go
    go.set()
    backend.shutdown()


def test_a_grammar_that_takes_too_long(runner, slow_backend):
    backend, _ = slow_backend
    engine = engine_on(runner, backend, grammar_timeout=0.05)
    results = engine.generate(input_ids=[[50], [60]], sampling_params=[params(regex="a"), params(9)])
    reason = results[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 400)
    assert "grammar_timeout, 0.05 s" in reason["message"]
    assert results[1]["output_ids"] == expected(backend, [60], params(9))
    check_all_back(engine)


def test_h19_abort_while_the_grammar_compiles(runner, slow_backend):
    backend, go = slow_backend
    engine = engine_on(runner, backend)
    stream = engine.generate(input_ids=[50], sampling_params=params(regex="[a-z]{4}"), rid="a", stream=True)
    for _ in range(3):
        turn(engine)
    assert engine.metrics()["running"] == 0
    engine.abort("a")
    (result,) = stream
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert result["output_ids"] == []
    engine.abort("a")
    closed = engine.generate(input_ids=[51], sampling_params=params(regex="[a-z]{4}"), stream=True)
    turn(engine)
    closed.close()
    check_all_back(engine)
    go.set()
    result = engine.generate(input_ids=[52], sampling_params=params(regex="[a-z]{4}"))
    assert result["output_ids"] == expected(byte_backend(), [52], params(regex="[a-z]{4}"))


def test_waiting_for_a_grammar_does_not_turn_the_loop_hot(runner, slow_backend):
    backend, go = slow_backend
    engine = engine_on(runner, backend)
    waiter = threading.Thread(target=lambda: engine.generate(input_ids=[50], sampling_params=params(regex="[a-z]{4}")))
    waiter.start()
    began, turns = time.perf_counter(), engine.metrics()["turns"]
    time.sleep(0.3)
    per_second = (engine.metrics()["turns"] - turns) / (time.perf_counter() - began)
    other = engine.generate(input_ids=[60], sampling_params=params(9))  # others are served meanwhile
    assert other["output_ids"] == expected(backend, [60], params(9))
    go.set()
    waiter.join()
    assert per_second <= 1100  # a sleep of a millisecond between two turns


# Engines that take no grammars.


def test_refused_where_there_is_no_backend(runner):
    for settings, part in (
        ({"grammar_backend": "none"}, "grammar_backend llguidance, not none"),
        ({}, "a grammar backend"),
    ):
        engine = engine_on(runner, None, **settings)
        with pytest.raises(RequestError, match=f"regex needs {part}"):
            engine.generate(input_ids=[5], sampling_params=params(regex="a"))
        assert engine.generate(input_ids=[50], sampling_params=params(3))["output_ids"]


def test_refused_without_a_tokenizer():
    with (
        Engine(device="simulated", step_ms=0.0) as engine,
        pytest.raises(RequestError, match="json_schema needs a tokenizer and this model has none"),
    ):
        engine.generate(input_ids=[5], sampling_params={"json_schema": "{}"})


# The trace.


class Holding:
    """An Observer that holds the handling of each result until the forward behind it is done."""

    def __init__(self, engine):
        self.engine = engine

    def note(self, event, number):
        pass

    def reason(self, text):
        pass

    def row(self, event, request, tokens):
        if event == "committed":
            for _, handle in self.engine._scheduler.result_queue:
                while not self.engine.runner.is_forward_ready(handle):
                    time.sleep(1e-3)


@pytest.mark.parametrize("held", [False, True])
def test_the_device_idle_for_a_late_sampling_is_told_by_its_cause(monkeypatch, runner, backend, held):
    engine = engine_on(runner, backend)
    grammar(backend, "regex", "[a-z]{12}")
    if held:
        engine._scheduler.observer = Holding(engine)
    else:  # as on a device whose forwards take longer than the host
        monkeypatch.setattr(runner, "is_forward_ready", lambda handle: False)
    with engine.trace() as trace:
        result = engine.generate(input_ids=[50], sampling_params=params(12, regex="[a-z]{12}"))
    assert result["output_ids"] == expected(backend, [50], params(12, regex="[a-z]{12}"))
    kinds = {}
    for span in trace.device:
        kinds.setdefault(span.launch, {})[span.kind] = span
    delayed = {n: kind for n, kind in kinds.items() if "forward" in kind}
    assert len(delayed) == 13  # a prefill, 11 decode steps and the overrun
    for kind in delayed.values():
        assert kind["forward"].begin <= kind["forward"].end <= kind["sample"].begin <= kind["sample"].end
    gaps = [kind["sample"].begin - kind["forward"].end for n, kind in delayed.items() if 1 < n < 13]
    assert all(gap > 0 for gap in gaps) if held else not any(gaps)
    found = bubbles([trace])
    assert ("delayed sampling" in found) == held
    assert sum(found.values()) == pytest.approx(idle_time([trace]))
    lane = {span.kind for span in trace.lanes()["delayed sampling"]}
    assert lane == {"mask", "sample"}
