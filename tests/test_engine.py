"""The engine over the NumPy device: what callers see, whoever turns the loop."""

import gc
import threading
import time

import pytest
from helpers_engine import byte_level_tokenizer, check_all_back, host_engine, oracle

from jaxoverlap.core import RequestError
from jaxoverlap.engine import Engine, EngineError


def params(n, **more):
    return {"max_new_tokens": n, "temperature": 0.0, **more}


@pytest.fixture(params=[False, True], ids=["overlap", "normal"])
def engine(request):
    with host_engine(disable_overlap_schedule=request.param) as engine:
        yield engine


def test_one_request(engine):
    result = engine.generate(input_ids=[5, 6, 7], sampling_params=params(6), rid="a")
    latency = result["meta_info"].pop("e2e_latency")
    assert latency > 0
    assert result == {
        "output_ids": oracle([5, 6, 7], 6),
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": 6},
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "cached_tokens": 0,
        },
    }
    check_all_back(engine)


def test_text_in_text_out():
    with host_engine(tokenizer=byte_level_tokenizer(), vocab_size=257, scripts={"a": [*b"yes\n", 256]}) as engine:
        result = engine.generate("hi", params(9, stop_token_ids=[256]), rid="a")
        assert result["text"] == "yes\n"
        assert result["output_ids"] == [*b"yes\n", 256]
        assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": 256}
        assert result["meta_info"]["prompt_tokens"] == 2


@pytest.mark.parametrize("stops", [{"stop": "x<|end|>"}, {"stop_regex": r"x<\|end\|>"}])
def test_special_tokens_are_text_to_a_stop(stops):
    """As in SGLang; where they are skipped in what is shown, nothing is there to cut off."""
    (matched,) = stops.values()
    with host_engine(tokenizer=byte_level_tokenizer(), vocab_size=257, scripts={"a": [*b"wx", 256, *b"yz"]}) as engine:
        shown = engine.generate("hi", params(5, skip_special_tokens=False, **stops), rid="a")
        assert (shown["text"], shown["output_ids"]) == ("w", [*b"wx", 256])
        assert shown["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        skipped = engine.generate("hi", params(5, **stops), rid="a")
        assert (skipped["text"], skipped["output_ids"]) == ("wx", [*b"wx", 256])


def test_sampling_defaults_are_told_but_not_taken():
    """SGLang's Engine does not read generation_config.json either; its server does."""
    engine = host_engine()
    model = engine.model
    model.sampling_defaults["temperature"] = 0.3
    engine = Engine.from_parts(engine.config, model, engine.runner, engine.max_total_tokens)
    assert engine.sampling_defaults == {"temperature": 0.3}
    engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
    assert engine.runner.launches[0].requests[0].params.temperature == 1.0
    engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1, **engine.sampling_defaults})
    assert engine.runner.launches[-1].requests[0].params.temperature == 0.3


def test_many_requests_keep_their_order(engine):
    prompts = [[i + 3] * (1 + i % 7) for i in range(12)]
    counts = [1 + i % 5 for i in range(12)]
    results = engine.generate(input_ids=prompts, sampling_params=[params(n) for n in counts])
    assert [r["output_ids"] for r in results] == [oracle(p, n) for p, n in zip(prompts, counts)]
    assert all("index" not in r for r in results)
    assert engine.generate(input_ids=[[1]], sampling_params=params(2))[0]["output_ids"] == oracle([1], 2)
    assert engine.generate(prompt=[]) == []
    check_all_back(engine)


def test_cached_tokens(engine):
    prompt = list(range(5, 25))
    engine.generate(input_ids=prompt, sampling_params=params(1))
    engine.wait_idle()
    again = engine.generate(input_ids=prompt, sampling_params=params(1))
    assert again["meta_info"]["cached_tokens"] == 19  # all but the last token
    assert engine.flush_cache()
    assert engine.generate(input_ids=prompt, sampling_params=params(1))["meta_info"]["cached_tokens"] == 0


def test_a_stream_holds_everything_so_far(engine):
    want = oracle([5, 6], 7)
    results = list(engine.generate(input_ids=[5, 6], sampling_params=params(7), stream=True))
    assert [r["output_ids"] for r in results] == [want[: i + 1] for i in range(7)]
    assert [r["meta_info"]["finish_reason"] is None for r in results] == [True] * 6 + [False]


def test_stream_interval(engine):
    results = list(engine.generate(input_ids=[5], sampling_params=params(8, stream_interval=3), stream=True))
    assert [len(r["output_ids"]) for r in results] == [1, 4, 7, 8]


def test_a_stream_of_many(engine):
    prompts = [[5], [6, 7], [8]]
    last = {}
    for r in engine.generate(input_ids=prompts, sampling_params=params(5), stream=True):
        assert len(r["output_ids"]) >= len(last.get(r["index"], []))
        last[r["index"]] = r["output_ids"]
    assert last == {i: oracle(p, 5) for i, p in enumerate(prompts)}


def test_two_streams_turn_about(engine):
    one = engine.generate(input_ids=[5], sampling_params=params(9), stream=True)
    two = engine.generate(input_ids=[6], sampling_params=params(9), stream=True)
    got = [None, None]
    for a, b in zip(one, two):
        got = [a["output_ids"], b["output_ids"]]
    rest = [r["output_ids"] for r in two]
    assert got[0] == oracle([5], 9)
    assert (rest or [got[1]])[-1] == oracle([6], 9)


def test_what_another_caller_turned_is_given_in_one_piece(engine):
    stream = engine.generate(input_ids=[5], sampling_params=params(4), stream=True)
    engine.generate(input_ids=[6], sampling_params=params(9))
    assert [r["output_ids"] for r in stream] == [oracle([5], 4)]


MALFORMED = [
    ({"input_ids": []}, {}, "empty"),
    ({"input_ids": [5] * 122}, {}, "122 tokens"),
    ({"input_ids": [5]}, {"temperature": -1.0}, "temperature"),
    ({"input_ids": [5]}, {"temprature": 1.0}, "temprature"),
    ({"input_ids": [5]}, {"stop": 3}, "stop"),
    ({"input_ids": [5, 1000]}, {}, "1000"),
]


@pytest.mark.parametrize(("given", "sampling", "part"), MALFORMED)
def test_a_malformed_request_raises(engine, given, sampling, part):
    with pytest.raises(RequestError, match=part):
        engine.generate(**given, sampling_params=sampling)
    with pytest.raises(RequestError, match=part):
        engine.generate(**given, sampling_params=sampling, stream=True)
    assert engine.metrics()["turns"] == 0


def hundred():
    """(input_ids, sampling_params, part of the message or None) of a hundred requests, every fifth malformed."""
    for i in range(100):
        if i % 5 == 4:
            given, sampling, part = MALFORMED[i // 5 % len(MALFORMED)]
            yield given["input_ids"], sampling, part
        else:
            yield [3 + i] * (1 + i % 11), params(1 + i % 9), None


def check_hundred(results):
    assert len(results) == 100
    for (ids, sampling, part), result in zip(hundred(), results):
        reason = result["meta_info"]["finish_reason"]
        if part is None:
            assert result["output_ids"] == oracle(ids, sampling["max_new_tokens"])
            assert reason["type"] == "length"
        else:
            assert result["output_ids"] == []
            assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 400, "BadRequestError")
            assert part in reason["message"]


def test_a_hundred_in_a_list_every_fifth_malformed(engine):
    ids, sampling, _ = zip(*hundred())
    check_hundred(engine.generate(input_ids=list(ids), sampling_params=list(sampling)))
    check_all_back(engine)


def test_a_hundred_streamed_every_fifth_malformed(engine):
    ids, sampling, _ = zip(*hundred())
    last = {}
    for result in engine.generate(input_ids=list(ids), sampling_params=list(sampling), stream=True):
        last[result.pop("index")] = result
    check_hundred([last[i] for i in range(100)])


def in_threads(jobs, timeout=60.0):
    """Runs all at once; fails if one hangs. Returns what each returned or raised."""
    out = [None] * len(jobs)

    def work(i):
        try:
            out[i] = jobs[i]()
        except BaseException as e:
            out[i] = e

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    for t in threads:
        t.start()
    deadline = time.monotonic() + timeout
    for t in threads:
        t.join(max(0.0, deadline - time.monotonic()))
        assert not t.is_alive(), "a thread hangs"
    return out


def test_a_hundred_threads_every_fifth_malformed(engine):
    def job(ids, sampling):
        return lambda: engine.generate(input_ids=ids, sampling_params=sampling)

    cases = list(hundred())
    for (ids, sampling, part), got in zip(cases, in_threads([job(i, s) for i, s, _ in cases])):
        if part is None:
            assert got["output_ids"] == oracle(ids, sampling["max_new_tokens"])
        else:
            assert isinstance(got, RequestError)
            assert part in str(got)
    check_all_back(engine)


def test_threads_that_stream_abort_and_generate(engine):
    def stream(i):
        got = [r["output_ids"] for r in engine.generate(input_ids=[3 + i], sampling_params=params(20), stream=True)]
        return got[-1] == oracle([3 + i], 20)

    def leave(i):
        with engine.generate(input_ids=[3 + i], sampling_params=params(60), stream=True) as results:
            got = next(iter(results))["output_ids"]
        return got == oracle([3 + i], 60)[: len(got)]

    def abort(i):
        results = engine.generate(input_ids=[3 + i], sampling_params=params(60), stream=True, rid=f"abort{i}.")
        next(results)
        engine.abort(f"abort{i}.")
        last = list(results)[-1]
        return (
            last["meta_info"]["finish_reason"]["type"] == "abort"
            and last["output_ids"] == oracle([3 + i], 60)[: len(last["output_ids"])]
        )

    jobs = [lambda i=i: (stream, leave, abort)[i % 3](i) for i in range(24)]
    assert in_threads(jobs) == [True] * 24
    check_all_back(engine)


# tests/README.md H19


def test_h19_closing_a_stream_ends_its_request():
    with host_engine(max_running_requests=1, context_length=1024, max_total_tokens=1024) as engine:
        stream = engine.generate(input_ids=[5], sampling_params=params(512), stream=True, rid="a")
        for _ in range(3):
            next(stream)
        stream.close()
        assert engine.metrics()["running"] == 0
        assert engine.metrics()["output_tokens"] < 20
        assert list(stream) == []
        stream.close()
        assert engine.generate(input_ids=[6], sampling_params=params(3))["output_ids"] == oracle([6], 3)
        check_all_back(engine)


def test_h19_closing_a_stream_that_waits():
    with host_engine(max_running_requests=1, context_length=1024, max_total_tokens=1024) as engine:
        running = engine.generate(input_ids=[5], sampling_params=params(40), stream=True)
        next(running)
        waiting = engine.generate(input_ids=[6], sampling_params=params(512), stream=True)
        waiting.close()
        assert [r["output_ids"] for r in running][-1] == oracle([5], 40)
        assert engine.metrics()["output_tokens"] <= 42
        check_all_back(engine)


def test_h19_a_stream_left_to_the_garbage_collector(engine):
    for r in engine.generate(input_ids=[5], sampling_params=params(60), stream=True):
        if len(r["output_ids"]) == 3:
            break
    del r
    gc.collect()
    assert engine.metrics()["running"] == 0
    engine.generate(input_ids=[5], sampling_params=params(60), stream=True)  # dropped before its first result
    gc.collect()
    assert engine.metrics()["unfinished"] == 0
    check_all_back(engine)


def test_a_stream_collected_inside_a_turn(engine):
    """The collector may run anywhere; the abort is then seen by the next turn."""
    left = [engine.generate(input_ids=[5], sampling_params=params(60), stream=True)]
    launch = engine.runner.launch

    def collecting(launches):
        left.clear()
        return launch(launches)

    engine.runner.launch = collecting
    assert engine.generate(input_ids=[6], sampling_params=params(9))["output_ids"] == oracle([6], 9)
    assert engine.metrics()["unfinished"] == 0
    check_all_back(engine)


def test_abort(engine):
    stream = engine.generate(input_ids=[5], sampling_params=params(60), stream=True, rid="a")
    next(stream)
    engine.abort("b")  # unknown
    engine.abort("a")
    assert engine.metrics()["running"] == 0
    engine.abort("a")  # has ended
    (last,) = list(stream)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"] == oracle([5], 60)[: len(last["output_ids"])]
    assert engine.generate(input_ids=[5], sampling_params=params(3), rid="a")["output_ids"] == oracle([5], 3)
    engine.abort("a")
    check_all_back(engine)


def test_abort_means_that_id_alone(engine):
    one = engine.generate(input_ids=[5], sampling_params=params(9), stream=True, rid="r1")
    ten = engine.generate(input_ids=[6], sampling_params=params(9), stream=True, rid="r10")
    next(one)
    engine.abort("r1")
    assert list(ten)[-1]["output_ids"] == oracle([6], 9)


def test_abort_all(engine):
    streams = [engine.generate(input_ids=[5 + i], sampling_params=params(60), stream=True) for i in range(7)]
    next(streams[0])
    engine.abort(abort_all=True)
    assert [list(s)[-1]["meta_info"]["finish_reason"]["type"] for s in streams] == ["abort"] * 7
    check_all_back(engine)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(engine, mode):
    stream = engine.generate(input_ids=[5], sampling_params=params(12), stream=True)
    next(stream)
    engine.pause_generation(mode)
    assert (engine.metrics()["running"] == 0) == (mode == "retract")
    got = []
    thread = threading.Thread(target=lambda: got.extend(stream), daemon=True)
    thread.start()
    thread.join(0.2)
    turns = engine.metrics()["turns"]
    time.sleep(0.05)
    assert thread.is_alive()
    assert engine.metrics()["turns"] == turns  # a paused engine does not spin
    engine.continue_generation()
    thread.join(30)
    assert got[-1]["output_ids"] == oracle([5], 12)
    check_all_back(engine)


def test_pause_abort_ends_everything(engine):
    stream = engine.generate(input_ids=[5], sampling_params=params(60), stream=True)
    next(stream)
    engine.pause_generation("abort")
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    engine.continue_generation()
    assert engine.generate(input_ids=[6], sampling_params=params(3))["output_ids"] == oracle([6], 3)


def test_an_unknown_pause_mode_is_named(engine):
    with pytest.raises(ValueError, match="sideways"):
        engine.pause_generation("sideways")
    assert engine.generate(input_ids=[6], sampling_params=params(3))["output_ids"] == oracle([6], 3)


def test_shutdown_while_paused():
    engine = host_engine()
    stream = engine.generate(input_ids=[5], sampling_params=params(60), stream=True)
    next(stream)
    engine.pause_generation("in_place")
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        engine.generate(input_ids=[5])


def test_flush_cache_is_refused_while_requests_run(engine):
    stream = engine.generate(input_ids=[5], sampling_params=params(9), stream=True)
    next(stream)
    assert not engine.flush_cache()
    assert list(stream)[-1]["output_ids"] == oracle([5], 9)
    assert engine.flush_cache()


def test_logprobs(engine):
    # which ones: test_logprobs.py
    for r in engine.generate(input_ids=[5], sampling_params=params(4), return_logprob=True, stream=True):
        assert [t for _, t, _ in r["meta_info"]["output_token_logprobs"]] == r["output_ids"]
    assert "output_token_logprobs" not in engine.generate(input_ids=[5], sampling_params=params(4))["meta_info"]


def test_metrics(engine):
    assert engine.metrics()["last_result"] is None
    before = time.monotonic()
    engine.generate(input_ids=[5, 6], sampling_params=params(4))
    m = engine.metrics()
    assert before <= m["last_result"] <= time.monotonic()
    assert (m["output_tokens"], m["prompt_tokens"], m["finished"]) == (4, 2, 1)
    assert m["launches"] >= 4
    engine.generate(input_ids=[7], sampling_params=params(1))
    assert engine.metrics()["last_result"] > m["last_result"]


def test_chat():
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    with host_engine(tokenizer=tokenizer, vocab_size=1000) as engine:
        result = engine.chat([{"role": "user", "content": "hi"}], params(3))
        assert result["output_ids"] == oracle(list(b"u:hi|"), 3)
        with pytest.raises(RequestError, match=r"messages\[0\]"):
            engine.chat(["hi"])
        tokenizer.chat_template = None
        with pytest.raises(RequestError, match="no chat template"):
            engine.chat([{"role": "user", "content": "hi"}])
    with host_engine() as engine, pytest.raises(RequestError, match="tokenizer"):
        engine.chat([{"role": "user", "content": "hi"}])


class Breaks:
    """A runner whose n-th wait, or launch, raises."""

    def __init__(self, runner, error, at, where="wait"):
        self.runner, self.error, self.left, self.where = runner, error, at, where

    def _count(self, where):
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def launch(self, launches):
        self._count("launch")
        return self.runner.launch(launches)

    def sample(self, samples):
        return self.runner.sample(samples)

    def wait(self, handle):
        self._count("wait")
        time.sleep(0.002)
        return self.runner.wait(handle)

    def is_ready(self, handle):
        return self.runner.is_ready(handle)


@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("off", [False, True])
def test_an_error_in_a_turn_reaches_everybody(where, off):
    cause = ZeroDivisionError("the device is on fire")
    engine = host_engine(disable_overlap_schedule=off, wrap=lambda runner: Breaks(runner, cause, 5, where))
    idle = engine.generate(input_ids=[9], sampling_params=params(50), stream=True)
    jobs = [lambda i=i: engine.generate(input_ids=[3 + i], sampling_params=params(50)) for i in range(6)]
    for got in in_threads(jobs):
        assert isinstance(got, EngineError)
        assert "ZeroDivisionError: the device is on fire" in str(got)
        assert got.__cause__ is cause
    for use in (
        lambda: list(idle),
        lambda: engine.generate(input_ids=[3]),
        lambda: engine.generate(input_ids=[[3]]),
        lambda: engine.wait_idle(),
        lambda: engine.pause_generation("in_place"),
    ):
        with pytest.raises(EngineError, match="on fire"):
            use()
    idle.close()
    engine.abort("x")
    engine.shutdown()


def test_an_interrupt_in_a_turn_ends_the_engine():
    engine = host_engine(wrap=lambda runner: Breaks(runner, KeyboardInterrupt(), 3))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(input_ids=[5], sampling_params=params(50))
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        engine.generate(input_ids=[5])


def test_an_error_in_the_scheduler_reaches_the_caller(monkeypatch):
    engine = host_engine()

    def turn():
        raise AssertionError("bad page")
        yield

    monkeypatch.setattr(engine._scheduler, "turn", turn)
    with pytest.raises(EngineError, match="bad page"):
        engine.generate(input_ids=[5])


def test_a_request_that_gets_lost_is_an_error_and_no_hang():
    engine = host_engine()
    engine._scheduler.submit = lambda request: None
    with pytest.raises(EngineError, match="'x' was lost"):
        engine.generate(input_ids=[5], rid="x")


def test_settings_are_refused_before_anything_starts(monkeypatch):
    for settings, part in [
        ({"max_running": 3}, "max_running"),
        ({"page_size": 0}, "page_size"),
        ({"dp_size": 2}, "dp_size 2 needs enable_dp_attention"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm EAGLE"),
        ({"speculative_algorithm": "NGRAM", "max_logprobs": 2}, "max_logprobs and speculative_algorithm"),
        ({"speculative_algorithm": "STANDALONE", "speculative_draft_layers": 1}, "model checksum has no layers"),
        ({"model_path": "no/such/model"}, "no/such/model"),
    ]:
        with pytest.raises(ValueError, match=part):
            Engine(**{"model_path": "checksum", **settings})
    monkeypatch.setenv("JAXOVERLAP_PAGE_SIZ", "4")
    with pytest.raises(ValueError, match="JAXOVERLAP_PAGE_SIZ"):
        Engine("checksum")


def test_no_room_for_a_prompt():
    with pytest.raises(ValueError, match="max_total_tokens 7 and context_length 128"):
        host_engine(max_total_tokens=7)


def test_seeds_follow_random_seed():
    def seeds(random_seed):
        with host_engine(random_seed=random_seed) as engine:
            for i in range(3):
                engine.generate(input_ids=[5 + i], sampling_params=params(1))
            return [launch.requests[0].seed for launch in engine.runner.launches if launch.mode.is_extend]

    assert seeds(7) == seeds(7)
    assert seeds(7) != seeds(8)
    assert seeds(None) != seeds(None)


def test_shutdown_does_not_wait_for_what_comes_later():
    """New requests may not keep it from ending: of 50 ones that come while it waits for the others, none runs."""
    engine = host_engine()
    errors, wait_idle = [], engine.wait_idle

    def late():
        with pytest.raises(EngineError, match="shut down"):
            engine.generate(input_ids=[5], sampling_params=params(20))
        errors.append(1)

    threads = [threading.Thread(target=late) for _ in range(50)]

    def wait_with_company():
        for thread in threads:
            thread.start()
        wait_idle()

    engine.wait_idle = wait_with_company
    engine.shutdown()
    for thread in threads:
        thread.join()
    assert len(errors) == 50
    assert engine.runner.launches == []


def test_shutdown_while_others_generate():
    for _ in range(5):
        engine = host_engine()

        def forever(engine=engine):
            while True:
                engine.generate(input_ids=[5], sampling_params=params(20))

        def stop(engine=engine):
            time.sleep(0.01)
            engine.shutdown()

        *ended, _ = in_threads([forever, forever, stop])
        assert [type(e) for e in ended] == [EngineError] * 2
        assert all("shut down" in str(e) for e in ended)
