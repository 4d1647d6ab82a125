"""Compares a trace with the recorded one: every field but `slots`, `told` and `verify.grammar_states`."""

from __future__ import annotations

from typing import Any

RATIO_TOLERANCE = 1e-6
NOT_COMPARED = ("turn.told", "turn.batch.slots", "turn.verify.grammar_states")


def difference(want: Any, got: Any) -> str | None:
    """The first difference, named by rank, turn and field; None where there is none. A list holds a trace a rank."""
    if isinstance(want, list) != isinstance(got, list):
        return f"ranks: want {_ranks(want)}, got {_ranks(got)}"
    if not isinstance(want, list):
        return _of_trace(want, got)
    if len(want) != len(got):
        return f"ranks: want {len(want)}, got {len(got)}"
    for rank, pair in enumerate(zip(want, got)):
        found = _of_trace(*pair)
        if found:
            return f"rank {rank}, {found}"
    return None


def _ranks(trace: Any) -> str:
    return f"a list of {len(trace)}" if isinstance(trace, list) else "one trace"


def _of_trace(want: dict[str, Any], got: dict[str, Any]) -> str | None:
    for number, pair in enumerate(zip(want["turns"], got["turns"])):
        found = _of_value("turn", *pair)
        if found:
            return f"turn {number}: {found.removeprefix('turn.')}"
    if len(want["turns"]) != len(got["turns"]):
        return f"turns: want {len(want['turns'])}, got {len(got['turns'])}"
    totals = [{k: v for k, v in trace.items() if k != "turns"} for trace in (want, got)]
    return _of_value("total", *totals)


def _of_value(field: str, want: Any, got: Any) -> str | None:
    if field in NOT_COMPARED:
        return None
    if isinstance(want, dict) and isinstance(got, dict):
        for name in [*want, *(n for n in got if n not in want)]:
            here = f"{field}.{name}"
            if here in NOT_COMPARED:
                continue
            if (name in want) != (name in got):
                return f"{here}: want {want.get(name, 'nothing')}, got {got.get(name, 'nothing')}"
            found = _of_value(here, want[name], got[name])
            if found:
                return found
        return None
    if isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        return next(filter(None, (_of_value(field, *pair) for pair in zip(want, got))), None)
    if field == "turn.end.new_token_ratio":
        same = abs(want - got) <= RATIO_TOLERANCE
    else:
        same = type(want) is type(got) and want == got
    return None if same else f"{field}: want {want}, got {got}"
