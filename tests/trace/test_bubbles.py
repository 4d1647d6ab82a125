"""Idle time of the device and its causes: put together by hand, and from recorded runs."""

import itertools

import numpy as np
import pytest
from helpers_engine import host_engine, oracle

from jaxoverlap import Engine
from jaxoverlap.trace import read
from jaxoverlap.trace.bubbles import CAUSES, bubbles, gaps, idle_time
from jaxoverlap.trace.events import Span, Trace
from jaxoverlap.trace.recorder import Annotator, Recorder

MS = 1e-3


def host(kind, begin, end, cause="", launch=0):
    return Span(kind, begin * MS, end * MS, 1, launch, cause=cause)


def step(begin, end, launch=1, kind="step"):
    return Span(kind, begin * MS, end * MS, 1, launch)


def in_ms(times):
    return {cause: pytest.approx(1e3 * seconds) for cause, seconds in times.items()}


def test_a_gap_is_split_among_what_the_host_did_meanwhile():
    trace = Trace(
        [host("process", 8, 13), host("compose", 13, 15, "consecutive prefill"), host("receive", 17, 25, "no work")],
        [step(0, 10), step(20, 30, 2)],
    )
    assert {c: round(1e3 * t, 6) for c, t in bubbles([trace]).items()} == {
        "host late": 3, "consecutive prefill": 2, "no work": 3, "caller": 2,
    }  # fmt: skip
    assert idle_time([trace]) == pytest.approx(10 * MS)


def test_delayed_sampling_is_the_gap_inside_a_launch():
    forward, sample = step(0, 10, 1, "forward"), step(14, 15, 1, "sample")
    trace = Trace([host("process", 0, 40)], [forward, sample, step(18, 30, 2)])
    assert {c: round(1e3 * t, 6) for c, t in bubbles([trace]).items()} == {"host late": 3, "delayed sampling": 4}


def test_overlapping_host_spans_and_overlapping_steps_count_once():
    trace = Trace(
        [host("process", 0, 14), host("stream", 12, 18), host("stream", 13, 14)],
        [step(0, 10), step(2, 8, 2), step(20, 30, 3)],
    )
    assert gaps(trace) == [(pytest.approx(10 * MS), pytest.approx(20 * MS), "")]
    assert {c: round(1e3 * t, 6) for c, t in bubbles([trace]).items()} == {"host late": 8, "caller": 2}


def test_nothing_is_no_bubble():
    assert bubbles([Trace(), Trace([host("process", 0, 5)], [step(0, 1)])]) == {}
    assert idle_time([Trace()]) == 0


def test_random_traces_sum_up():
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges = np.cumsum(rng.exponential(1.0, 60))
        steps = [step(a, b, i) for i, (a, b) in enumerate(edges.reshape(-1, 2))]
        cuts = np.sort(rng.uniform(0, edges[-1], 80))
        causes = ["", *CAUSES]
        pairs = [pair for pair in itertools.pairwise(cuts) if rng.random() < 0.7]
        spans = [host("process", a, b, str(rng.choice(causes))) for a, b in pairs]
        trace = Trace(spans, steps)
        assert sum(bubbles([trace]).values()) == pytest.approx(idle_time([trace]))
        assert idle_time([trace]) == pytest.approx(MS * sum(edges[2::2] - edges[1:-1:2]))


def simulated(**settings):
    settings = {"step_ms": 2.0, "max_running_requests": 2, "context_length": 128, "random_seed": 0, **settings}
    return Engine(device="simulated", **settings)


@pytest.mark.parametrize("off", [False, True])
def test_a_recorded_trace_sums_up(off):
    params = {"max_new_tokens": 8, "temperature": 0.0}
    with simulated(disable_overlap_schedule=off) as engine, engine.trace() as trace:
        engine.generate(input_ids=[[5, 6], [7], [8, 9, 10]], sampling_params=params)
        engine.wait_idle()
        engine.generate(input_ids=[11], sampling_params=params)
    found = bubbles([trace])
    assert sum(found.values()) == pytest.approx(idle_time([trace]))
    assert idle_time([trace]) > 0  # between the calls, at least
    assert ("host late" in found) or not off
    assert [s.launch for s in trace.device] == sorted(s.launch for s in trace.device)


def test_the_simulated_device_tells_its_own_times():
    with simulated() as engine, engine.trace() as trace:
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 20, "temperature": 0.0})
    assert all(s.length == pytest.approx(0.002) for s in trace.device)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(trace.device))


def test_consecutive_prefill_and_no_work_are_named():
    settings = {"disable_consecutive_prefill_overlap": True, "chunked_prefill_size": 16}
    with simulated(**settings) as engine, engine.trace() as trace:
        engine.generate(input_ids=list(range(10, 70)), sampling_params={"max_new_tokens": 3})
    causes = {s.cause for s in trace.host}
    assert {"consecutive prefill", "no work", ""} == causes
    assert bubbles([trace])["consecutive prefill"] > 0


def test_parts_come_in_the_order_of_the_loop():
    with host_engine() as engine, engine.trace() as trace:
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 6, "temperature": 0.0})
    turns = {}
    for s in trace.host:
        turns.setdefault(s.turn, []).append(s.kind)
    middle = turns[3]
    expected = ["receive", "compose", "launch", "process", "wait", "process", "stream", "process", "stream"]
    assert middle in (expected, expected[:-1])  # the last: something was told to the caller


def test_a_compile_in_a_launch_is_named():
    class Compiling:
        compiles = 0

        def __init__(self, runner):
            self.runner = runner

        def __getattr__(self, name):
            return getattr(self.runner, name)

        def launch(self, launches):
            self.compiles += launches[0].number == 2
            return self.runner.launch(launches)

    with host_engine(wrap=Compiling) as engine, engine.trace() as trace:
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 4, "temperature": 0.0})
    assert [s.launch for s in trace.host if s.cause == "compile"] == [2]


@pytest.mark.parametrize("seen", [False, True])
def test_delayed_sampling_on_a_device_that_tells_nothing(seen):
    class Mode:
        value = "DECODE"

    log = [read.TURN, 0.0]
    log += ["launch", 1.0, 2.0, 7, Mode, 1]
    log += [read.FORWARD, 7, 3.0] if seen else []
    log += ["mask", 4.5]
    log += ["sample", 5.0, 6.0, 7, Mode, 1]
    log += ["wait", 7.0, 9.0, 7, read.READY, 7, 9.0, read.END, 10.0, 10.0]
    trace = read.read(log, [])
    spans = [(s.kind, s.begin, s.end) for s in trace.device]
    if seen:  # the device stood still from the forward's end on
        assert spans == [("forward", 1.0, 3.0), ("sample", 5.0, 9.0)]
        assert bubbles([trace]) == {"delayed sampling": pytest.approx(2.0)}
    else:  # it was busy until the sampling was there
        assert spans == [("forward", 1.0, 9.0), ("sample", 9.0, 9.0)]
        assert bubbles([trace]) == {}
    lane = [(s.kind, s.begin, s.end) for s in trace.lanes()["delayed sampling"]]
    assert lane == [("mask", 2.0, 4.5), ("sample", 5.0, 6.0)]


def test_annotations_are_nested_as_sglang_s():
    said = []

    class Annotation:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            said.append(f"<{self.name}")

        def __exit__(self, *_):
            said.append(f"{self.name}>")

    with host_engine() as engine:
        annotator = Annotator(engine.runner, Annotation)
        engine._loop.record(annotator)
        result = engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 3, "temperature": 0.0})
    assert result["output_ids"] == oracle([5], 3)
    text = " ".join(said)
    turn = (
        "<process_input_requests process_input_requests> <get_next_batch_to_run get_next_batch_to_run> "
        "<run_batch run_batch> <process_batch_result <wait wait> <stream_output stream_output> process_batch_result>"
    )
    assert turn in text
    depth = 0
    for word in said:
        depth += 1 if word.startswith("<") else -1
        assert 0 <= depth <= 2
    assert depth == 0


def test_annotations_reach_the_profiler(tmp_path):
    jax = pytest.importorskip("jax")
    with host_engine() as engine, jax.profiler.trace(str(tmp_path)), engine.trace(annotations=True):
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 3, "temperature": 0.0})
    (file,) = tmp_path.rglob("*.xplane.pb")
    data = file.read_bytes()
    for name in (b"run_batch", b"process_batch_result", b"get_next_batch_to_run", b"stream_output"):
        assert name in data


def test_a_recorder_gives_what_it_has_so_far():
    with host_engine() as engine:
        recorder = Recorder(engine.runner)
        assert recorder.trace() == Trace()
        engine._loop.record(recorder)
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 2, "temperature": 0.0})
        first = len(recorder.trace().host)
        engine.generate(input_ids=[6], sampling_params={"max_new_tokens": 2, "temperature": 0.0})
        assert len(recorder.trace().host) > first > 0


def test_an_entry_that_is_being_written_is_left_out():
    with host_engine() as engine:
        recorder = Recorder(engine.runner)
        engine._loop.record(recorder)
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 2, "temperature": 0.0})
    log = recorder._log
    whole = [(s.kind, s.begin, s.end) for s in read.read(log, []).host]
    lengths = []
    for cut in range(len(log)):
        host = read.read(log[:cut], []).host
        assert [(s.kind, s.begin, s.end) for s in host] == whole[: len(host)]
        lengths.append(len(host))
    assert lengths == sorted(lengths)
    assert 0 < lengths[-1] < len(whole)


def test_a_wait_for_a_launch_before_the_trace_has_its_number_alone():
    with simulated(step_ms=20.0) as engine:
        results = engine.generate(
            input_ids=[[5, 6], [7]], sampling_params={"max_new_tokens": 4, "temperature": 0.0}, stream=True
        )
        next(results)
        with engine.trace() as trace:
            list(results)
    first, *others = [s for s in trace.host if s.kind == "wait"]
    launched = {s.launch for s in trace.host if s.kind == "launch"}
    assert first.launch not in launched
    assert (first.mode, first.rows) == ("", 0)
    assert {s.launch for s in others} <= launched
    assert {(s.mode, s.rows) for s in others} == {("DECODE", 2)}


def test_a_turn_leaves_few_entries_in_the_log():
    """What recording costs is what it appends: no objects a row, no more with more rows."""
    lengths = set()
    for rows in (1, 4):
        with host_engine(max_total_tokens=512) as engine:
            recorder = Recorder(engine.runner)
            engine._loop.record(recorder)
            ids = [[5 + i] for i in range(rows)]
            engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 100, "ignore_eos": True})
            turns = recorder._log.count(read.TURN)
            lengths.add(len(recorder._log) // engine.metrics()["turns"])
            assert turns >= 100
    assert len(lengths) == 1
    assert lengths.pop() < 40
