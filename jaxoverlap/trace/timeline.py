"""A trace as two lanes of text."""

from __future__ import annotations

from jaxoverlap.trace.events import Span, Trace

GLYPHS = {
    "receive": "r",
    "compose": "c",
    "launch": "L",
    "mask": "m",
    "sample": "S",
    "sync": "y",
    "process": "p",
    "stream": "s",
    "wait": ".",
}
LEGEND = (
    "host: r receive  c compose  L launch  p process  s stream  . wait for the device",
    "      m mask  S delayed sampling  y exchange with the other ranks",
    "host work shorter than a column still takes one",
    "device: the number of each step, = and # in turn",
)
LABEL = 8  # columns of a lane's name


def window(trace: Trace, steps: int = 5) -> tuple[float, float]:
    """Begin and end of `steps` decode steps in the middle of the trace (all of it, if it has fewer), with the host
    work before them."""
    steps_only = [s for s in trace.device if s.kind != "sample"]
    decodes = [s for s in steps_only if s.mode == "DECODE"] or steps_only
    if not decodes:
        return trace.begin, trace.end
    first = max(0, (len(decodes) - steps) // 2)
    chosen = decodes[first : first + steps]
    begin = min((s.begin for s in trace.host if s.turn == chosen[0].turn), default=chosen[0].begin)
    return begin, max(s.end for s in trace.device if s.launch == chosen[-1].launch)


def lanes(trace: Trace, begin: float, end: float, width: int = 100) -> list[str]:
    """Three lines of at most `width` columns: time axis, host, device.

    A column shows what took most of it; host work that is shorter than a column still takes one, so that it is seen.
    Raises ValueError for an empty interval or a width below 40.
    """
    if not end > begin:
        raise ValueError(f"a timeline needs an end after its begin, not {begin} to {end}")
    if width < 40:
        raise ValueError(f"a timeline needs a width of at least 40 columns, not {width}")
    columns = width - LABEL
    shown = trace.between(begin, end)
    scale = columns / (end - begin)
    host = _host_lane(shown.host, begin, scale, columns)
    device = _device_lane(shown.device, begin, scale, columns)
    right = f"{float(f'{1e3 * (end - begin):.3g}'):,g} ms"
    axis = "0" + right.rjust(columns - 1)
    return [" " * LABEL + axis, "host".ljust(LABEL) + host.rstrip(), "device".ljust(LABEL) + device.rstrip()]


def _columns(span: Span, begin: float, scale: float, columns: int) -> tuple[float, float]:
    return max(0.0, (span.begin - begin) * scale), min(float(columns), (span.end - begin) * scale)


def _host_lane(spans: list[Span], begin: float, scale: float, columns: int) -> str:
    share = [dict[str, float]() for _ in range(columns)]
    for span in spans:
        left, right = _columns(span, begin, scale, columns)
        for i in range(int(left), min(columns, int(right) + 1)):
            part = min(right, i + 1) - max(left, i)
            if part > 0:
                share[i][span.kind] = share[i].get(span.kind, 0.0) + part
    lane = []
    for kinds in share:
        work = {k: v for k, v in kinds.items() if k != "wait"}
        best = max(work, key=work.__getitem__) if work else next(iter(kinds), None)
        lane.append(" " if best is None else GLYPHS[best])
    return "".join(lane)


def _device_lane(spans: list[Span], begin: float, scale: float, columns: int) -> str:
    lane = [" "] * columns
    for span in spans:
        left, right = _columns(span, begin, scale, columns)
        first, last = round(left), max(round(right), round(left) + 1)
        for i in range(first, min(last, columns)):
            lane[i] = "=#"[span.launch % 2]
        number = str(span.launch)
        if last - first >= len(number) + 1 and first + len(number) <= columns:
            lane[first : first + len(number)] = number
    return "".join(lane)
