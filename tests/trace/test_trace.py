"""Traces put together by hand, and recorded ones whose turns are known."""

import itertools
import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
from helpers_engine import host_engine, oracle

from jaxoverlap.trace import export
from jaxoverlap.trace.events import Span, Trace
from jaxoverlap.trace.export import chrome_trace, write_timeline
from jaxoverlap.trace.summary import in_flight, percentiles, step_times, summarize
from jaxoverlap.trace.timeline import lanes, window

MS = 1e-3


def span(kind, begin, end, turn=1, launch=0, mode="DECODE", rows=1):
    return Span(kind, begin * MS, end * MS, turn, launch, mode if launch else "", rows if launch else 0)


def normal_trace(steps=4):
    """Each turn of 10 ms: compose 1, launch 1, wait 6, process 2; the step runs for 7, from its launch call on."""
    host, device = [], []
    for i in range(steps):
        t = 10 * i
        host += [span("compose", t, t + 1, i + 1), span("launch", t + 1, t + 2, i + 1, i + 1)]
        host += [span("wait", t + 2, t + 8, i + 1, i + 1), span("process", t + 8, t + 10, i + 1)]
        device.append(span("step", t + 1, t + 8, i + 1, i + 1))
    return Trace(host, device)


def overlap_trace(steps=4):
    """Turns of 7 ms, the device always busy: compose 1, launch 1, wait 3, process 2 of the step before."""
    host, device = [], []
    for i in range(steps):
        t = 7 * i
        host += [span("compose", t, t + 1, i + 1), span("launch", t + 1, t + 2, i + 1, i + 1)]
        if i:
            host += [span("wait", t + 2, t + 5, i + 1, i)]
        host += [span("process", t + 5, t + 7, i + 1)]
        device.append(span("step", 1 if i == 0 else 7 * i + 5, 7 * i + 12, i + 1, i + 1))
    return Trace(host, device)


def test_normal_loop_figures():
    s = summarize([normal_trace()])
    assert (s["launches"], s["decode_steps"]) == (4, 4)
    assert s["step_ms"]["p50"] == pytest.approx(10)
    assert s["host_ms"]["p50"] == pytest.approx(4)
    assert s["wait_ms"]["p90"] == pytest.approx(6)
    assert s["hidden"] == pytest.approx(0)
    assert s["device_busy"] == pytest.approx(28 / 37)
    assert s["parts_ms"] == pytest.approx({"compose": 1, "launch": 1, "wait": 6, "process": 2})


def test_overlap_loop_figures():
    s = summarize([overlap_trace()])
    assert s["step_ms"]["p50"] == pytest.approx(7)
    # all but the first turn's compose and launch lies in [2, 33]
    assert s["hidden"] == pytest.approx((4 * 4 - 2) / 16)
    assert s["device_busy"] == pytest.approx(1)


def test_several_traces_are_pooled():
    s = summarize([normal_trace(2), overlap_trace(3)])
    assert s["launches"] == 5
    assert sorted(round(1e3 * t) for t in step_times(normal_trace(2)) + step_times(overlap_trace(3))) == [7, 10]
    assert s["step_ms"]["mean"] == pytest.approx(8.5)
    assert s["device_busy"] == pytest.approx((14 + 25) / (17 + 25))


def test_nothing_measured():
    s = summarize([Trace()])
    assert s["hidden"] is None
    assert s["device_busy"] is None
    assert s["step_ms"] == {"p50": None, "p90": None, "mean": None}
    assert s["parts_ms"] == {}


def test_percentiles():
    assert percentiles([0.001 * i for i in range(11)]) == pytest.approx({"p50": 5.0, "p90": 9.0, "mean": 5.0})


def test_a_step_is_in_flight_from_the_return_of_its_launch():
    assert np.array(in_flight(normal_trace(2))) == pytest.approx(np.array([(2, 8), (12, 18)]) * MS)
    assert np.array(in_flight(overlap_trace(3))) == pytest.approx(np.array([(2, 26)]) * MS)
    done = Trace([span("launch", 0, 5, 1, 1)], [span("step", 0, 4, 1, 1)])
    assert in_flight(done) == []


def test_lanes_of_text():
    axis, host, device = lanes(normal_trace(2), 0.0, 20 * MS, width=8 + 80)
    assert axis == " " * 8 + "0" + "20 ms".rjust(79)
    assert host == "host    " + ("cccc" + "LLLL" + "." * 24 + "p" * 8) * 2
    assert device == "device  " + " " * 4 + "1" + "#" * 27 + " " * 12 + "2" + "=" * 27


def test_short_work_is_seen_and_lanes_fit():
    trace = Trace(
        [
            span("compose", 0, 0.1),
            span("launch", 0.1, 0.2, 1, 1),
            span("wait", 0.2, 99, 1, 1),
            span("process", 99, 100),
        ],
        [span("step", 0.1, 99, 1, 1)],
    )
    for width in (40, 60, 100):
        lines = lanes(trace, 0.0, 100 * MS, width)
        assert max(map(len, lines)) <= width
        assert lines[1].endswith("p")
        assert set(lines[1][8:]) == set("c.p") or set(lines[1][8:]) == set("L.p")


def test_lanes_refuse_nonsense():
    with pytest.raises(ValueError, match="end after its begin"):
        lanes(normal_trace(), 1.0, 1.0)
    with pytest.raises(ValueError, match="at least 40"):
        lanes(normal_trace(), 0.0, 1.0, 20)


def test_window_is_in_the_middle_and_holds_the_host_work_before():
    begin, end = window(normal_trace(9), 3)
    assert (begin, end) == pytest.approx((30 * MS, 58 * MS))
    assert window(normal_trace(2), 5) == pytest.approx((0, 18 * MS))
    assert window(Trace(), 5) == (0.0, 0.0)


def test_window_counts_a_forward_and_its_sampling_as_one_step():
    trace = normal_trace(9)
    trace.device = [
        part
        for s in trace.device
        for part in (
            span("forward", 1e3 * s.begin, 1e3 * s.end - 2, s.turn, s.launch),
            span("sample", 1e3 * s.end - 1, 1e3 * s.end, s.turn, s.launch),
        )
    ]
    assert window(trace, 3) == pytest.approx((30 * MS, 58 * MS))


def test_chrome_trace():
    events = chrome_trace({"normal": normal_trace(2), "overlap": overlap_trace(2)})["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    lanes = ("host", "launch", "device", "wait")
    assert names == {(p, n) for p, loop in ((1, "normal"), (2, "overlap")) for n in (loop, *lanes)}
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 3]
    assert [e["name"] for e in steps] == ["DECODE 1", "DECODE 2"]
    assert [(e["ts"], e["dur"]) for e in steps] == [pytest.approx((1000, 7000)), pytest.approx((11000, 7000))]


def test_records_are_flat():
    records = normal_trace(1).records()
    assert len(records) == 5
    assert [r["lane"] for r in records] == ["host", "host", "launch", "device", "wait"]
    assert records[3] == {
        "lane": "device", "kind": "step", "begin": 1 * MS, "end": 8 * MS,
        "turn": 1, "launch": 1, "mode": "DECODE", "rows": 1, "cause": "", "tokens": 0,
    }  # fmt: skip


def test_files(tmp_path):
    traces = {"normal": normal_trace(), "overlap": overlap_trace()}
    windows = {name: window(t) for name, t in traces.items()}
    write_timeline(tmp_path / "t.json", traces, windows)
    assert json.loads((tmp_path / "t.json").read_text()) == json.loads(json.dumps(chrome_trace(traces)))
    write_timeline(tmp_path / "t.png", traces, windows)
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match=r"t\.svg"):
        write_timeline(tmp_path / "t.svg", traces, windows)
    with pytest.raises(ValueError, match="nowhere"):
        write_timeline(tmp_path / "nowhere" / "t.png", traces, windows)


def test_png_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"jaxoverlap\[demo\]"):
        export.check_timeline_path(tmp_path / "t.png")


@pytest.mark.parametrize("off", [False, True])
def test_a_recorded_trace(off):
    with host_engine(disable_overlap_schedule=off) as engine:
        engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 2, "temperature": 0.0})
        engine.wait_idle()
        plain, turns, launches = engine._loop.driver, engine.metrics()["turns"], engine.metrics()["launches"]
        with engine.trace() as trace:
            assert trace.host == []
            stream = engine.generate(
                input_ids=[6], sampling_params={"max_new_tokens": 5, "temperature": 0.0}, stream=True
            )
            assert [r["output_ids"] for r in stream][-1] == oracle([6], 5)
        assert engine._loop.driver is plain
        after = engine.metrics()
    launched = [s for s in trace.host if s.kind == "launch"]
    assert len({s.turn for s in trace.host}) == after["turns"] - turns
    assert len(launched) == len(trace.device) == after["launches"] - launches == (5 if off else 6)
    assert [s.launch for s in launched] == [s.launch for s in trace.device]
    assert [s.mode for s in launched] == ["EXTEND"] + ["DECODE"] * (len(launched) - 1)
    assert all(s.rows == 1 for s in launched)
    assert all(a.end <= b.begin for a, b in zip(trace.host, trace.host[1:]))
    order = [(s.kind, s.launch) for s in trace.host if s.kind in ("launch", "wait")]
    numbers = [s.launch for s in launched]
    if off:
        assert order == [(kind, n) for n in numbers for kind in ("launch", "wait")]
    else:
        steps = [[("launch", b), ("wait", a)] for a, b in itertools.pairwise(numbers)]
        assert order == [("launch", numbers[0]), *(e for step in steps for e in step), ("wait", numbers[-1])]


def test_one_trace_at_a_time():
    params = {"max_new_tokens": 4, "temperature": 0.0}
    with host_engine() as engine:
        with engine.trace() as outer:
            engine.generate(input_ids=[5], sampling_params=params)
            with pytest.raises(RuntimeError, match="one trace at a time"), engine.trace():
                pass
            engine.generate(input_ids=[6], sampling_params=params)
        engine.generate(input_ids=[7], sampling_params=params)
        with engine.trace() as after:
            engine.generate(input_ids=[8], sampling_params=params)
        assert engine._scheduler.watch is None
    kinds = Counter(s.kind for s in outer.host)
    alone = Counter(s.kind for s in after.host)
    assert kinds["receive"] == len({s.turn for s in outer.host}) > alone["receive"] > 0
    assert kinds["launch"] == 2 * alone["launch"]


def test_a_trace_begins_with_a_turn_while_others_generate():
    params = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    with host_engine(max_total_tokens=512) as engine:
        done = threading.Event()

        def others():
            while not done.is_set():
                engine.generate(input_ids=[6, 7], sampling_params=params)
                done.wait(1e-3)  # a trace ends when the engine is idle

        threads = [threading.Thread(target=others) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(30):
                before = time.perf_counter()
                with engine.trace() as trace:
                    engine.generate(input_ids=[5], sampling_params=params)
                first = {s.kind for s in trace.host if s.turn == 1}
                assert {"receive", "compose"} <= first
                assert all(before <= s.begin <= s.end for s in trace.host if s.turn > 0)
        finally:
            done.set()
            for thread in threads:
                thread.join()


def test_a_trace_of_a_failing_engine_lets_the_error_out():
    engine = host_engine()
    engine.runner.launch = lambda launches: 1 / 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"), engine.trace():
        engine.generate(input_ids=[5])
