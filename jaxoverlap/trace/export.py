"""Traces as files: a PNG to look at, JSON for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxoverlap.trace.events import Span, Trace

COLOURS = {
    "compose": "#4c78a8",
    "launch": "#f58518",
    "sample": "#b279a2",
    "sync": "#9d755d",
    "process": "#54a24b",
    "stream": "#72b7b2",
    "wait": "#e4e4e4",
    "step": "#8a8fb9",
    "other step": "#5d6299",
}


def chrome_trace(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """The Trace Event format: one process a trace, one thread a lane, times in microseconds from the trace's begin."""
    events: list[dict[str, Any]] = []
    for pid, (name, trace) in enumerate(traces.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        for tid, (lane, spans) in enumerate((("host", trace.host), ("device", trace.device)), 1):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}})
            events += [_event(span, pid, tid, trace.begin) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(span: Span, pid: int, tid: int, origin: float) -> dict[str, Any]:
    name = f"{span.mode} {span.launch}" if span.kind == "step" else span.kind
    args = {"turn": span.turn, "launch": span.launch, "mode": span.mode, "rows": span.rows}
    ts, dur = 1e6 * (span.begin - origin), 1e6 * span.length
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def write_timeline(path: Path, traces: Mapping[str, Trace], windows: Mapping[str, tuple[float, float]]) -> None:
    """Writes FILE.png (the windows) or FILE.json (everything). Raises ValueError for another suffix."""
    check_timeline_path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(traces)))
    else:
        _write_png(path, traces, windows)


def check_timeline_path(path: Path) -> None:
    """Raises ValueError or ImportError, before anything is measured, when `write_timeline` could not write there."""
    if path.suffix not in (".png", ".json"):
        raise ValueError(f"a timeline is written as FILE.png or FILE.json, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"folder {str(path.parent)!r} does not exist")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ImportError('a PNG timeline needs matplotlib: pip install "jaxoverlap[demo]"') from None


def _write_png(path: Path, traces: Mapping[str, Trace], windows: Mapping[str, tuple[float, float]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 0.9 + 1.7 * len(traces)), dpi=130, layout="constrained")
    axes = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    kinds: dict[str, None] = {}
    for axis, (name, trace) in zip(axes, traces.items(), strict=True):
        begin, end = windows[name]
        shown = trace.between(begin, end)
        for y, spans in ((1, shown.host), (0, shown.device)):
            _draw(axis, spans, y, begin)
        kinds.update(dict.fromkeys(s.kind for s in shown.host))
        axis.set_yticks([1, 0], ["host", "device"])
        axis.set_ylim(-0.5, 1.5)
        axis.set_title(name, loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlim(0, max(1e3 * (end - begin) for begin, end in windows.values()))
    axes[-1].set_xlabel("milliseconds")
    labels = {**dict.fromkeys(k for k in COLOURS if k in kinds), "step": None}
    patches = [Patch(color=COLOURS[k], label=k) for k in labels]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path)


def _draw(axis: Any, spans: list[Span], y: int, origin: float) -> None:
    for span in spans:
        colour = "other step" if span.kind == "step" and span.launch % 2 else span.kind
        left, length = 1e3 * (span.begin - origin), 1e3 * span.length
        axis.broken_barh([(left, length)], (y - 0.35, 0.7), color=COLOURS[colour], linewidth=0)
        if span.kind == "step":
            axis.text(left + length / 2, y, str(span.launch), ha="center", va="center", color="white", fontsize=8)
