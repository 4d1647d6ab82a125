"""A replay to read: the turns of both loops beside each other (`--show`), and why they went so (`--explain`)."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from jaxoverlap.replay.recorder import Recorder
from jaxoverlap.replay.scenario import Scenario

SIDE_BY_SIDE = 100  # columns of a terminal from which the loops stand beside each other
LABEL = 9  # columns for what a line is about
LOOPS = ("normal", "overlap")


def show(
    out: Console, scenario: Scenario, normal: list[Recorder], overlap: list[Recorder], *, turns: bool, reasons: bool
) -> None:
    """`turns`: what happened in each turn; `reasons`: why, beside the batch alone where `turns` is off."""
    out.print(Rule(Text(scenario.name, "bold"), align="left"))
    if scenario.about:
        out.print(Text(scenario.about, "italic"))
    if out.width >= SIDE_BY_SIDE:
        out.print(beside(out.width, [Group(Text(name, "bold underline")) for name in LOOPS]))
    for rank, pair in enumerate(zip(normal, overlap)):
        if len(normal) > 1:
            out.print(Rule(f"rank {rank}", align="left"))
        for number, sides in enumerate(zip_longest(*(zip(r.turns, r.reasons) for r in pair))):
            arriving = [describe_op(op) for op in scenario.ops if op["at"] == number and op.get("rank", rank) == rank]
            out.print(Text("  ".join([f"turn {number}", *arriving]), "bold"))
            cells = [Group(*lines(*side, turns=turns, reasons=reasons)) if side else Group() for side in sides]
            out.print(beside(out.width, cells))
        out.print(beside(out.width, [Group(*totals(r)) for r in pair]))


def beside(width: int, cells: list[Group]) -> Table:
    """normal left, overlap right; one above the other where the terminal is too narrow."""
    if width >= SIDE_BY_SIDE:
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(ratio=1, overflow="fold")
        table.add_column(ratio=1, overflow="fold")
        table.add_row(*cells)
        return table
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=7)
    table.add_column(overflow="fold")
    for name, cell in zip(LOOPS, cells):
        table.add_row(Text(name, "bold dim"), cell)
    return table


def describe_op(op: dict[str, Any]) -> str:
    if op["op"] == "request":
        return f"+ {op['rid']} ({len(op['prompt_ids'])} tokens, at most {op['max_new_tokens']} out)"
    return " ".join([op["op"], op.get("mode", "all" if op.get("all") else op.get("rid", ""))]).rstrip()


def lines(turn: dict[str, Any], why: list[str], *, turns: bool, reasons: bool) -> list[Text]:
    out = [Text(batch_line(turn.get("batch")), "cyan" if "batch" in turn else "dim")]
    if turns:
        flags = ["no overlap"] if turn.get("overlap_disabled") else []
        out += labelled("order", [short(event) for event in turn["order"]] + flags)
        out += labelled("commits", commits(turn), "green")
        for name, label in (("middle_chunk", "mid-chunk"), ("dropped", "drops"), ("retracted", "puts back")):
            out += labelled(label, turn.get(name, []), "red" if name == "dropped" else "yellow")
        for verify in turn.get("verify", []):
            accepted = [f"{rid} {n}" for rid, n in zip(verify["rids"], verify["accept_lens"])]
            out += labelled("accepts", accepted, "green")
        out += pool_lines(turn["end"])
    if reasons:
        for text in [*why, *order_reasons(turn)]:
            out += labelled("why", [text], "magenta")
    return out


def labelled(label: str, parts: list[str], style: str = "") -> list[Text]:
    return [Text(f"{label:{LABEL}} {'  '.join(parts)}", style)] if parts else []


def batch_line(batch: dict[str, Any] | None) -> str:
    """Prefill rows as `cached+new` tokens (… where the prompt goes on), decode rows as their length."""
    if batch is None:
        return "no batch"
    decoding = set(batch.get("decoding", batch["rids"] if batch["mode"] == "DECODE" else ()))
    rows = []
    for i, (rid, length) in enumerate(zip(batch["rids"], batch["seq_lens"])):
        if rid in decoding:
            rows.append(f"{rid} @{length}")
        else:
            more = "…" if rid == batch.get("chunked") else ""
            rows.append(f"{rid} {batch['prefix_lens'][i]}+{batch['extend_lens'][i]}{more}")
    tokens = [f"all ranks {batch['global_num_tokens']}"] if "global_num_tokens" in batch else []
    return f"{batch['mode']:{LABEL}} {'  '.join(rows + tokens)}".rstrip()


def short(event: str) -> str:
    """`run 3` as run3; delayed_sample as it is."""
    return event.replace(" ", "")


def commits(turn: dict[str, Any]) -> list[str]:
    ended = turn.get("finished", {})
    committed = turn.get("committed", {})
    parts = [f"{rid} +{len(ids)}" + (f" ({ended[rid]})" if rid in ended else "") for rid, ids in committed.items()]
    return parts + [f"{rid} ({why})" for rid, why in ended.items() if rid not in committed]


def pool_lines(end: dict[str, Any]) -> list[Text]:
    kv = f"kv {end['free_kv']} free, {end['evictable']} cached, {end['protected']} locked"
    rest = [f"slots {end['free_req_slots']} free", f"ratio {end['new_token_ratio']:.4f}"]
    rows = [f"{name} {', '.join(end[name])}" for name in ("running", "waiting") if end[name]]
    in_flight = [f"in flight {end['queue_len']}"] if end["queue_len"] else []
    return labelled("end", [kv, *rest], "dim") + labelled("", rows + in_flight, "dim")


def order_reasons(turn: dict[str, Any]) -> list[str]:
    """What the order of events itself says about overlap."""
    order = turn["order"]
    numbers = {name: number for name, _, number in (event.partition(" ") for event in order) if number}
    launched, handled = numbers.get("run"), numbers.get("process")
    overlaps = "push" in numbers
    out = []
    if overlaps and handled is None:
        out.append(f"launch {launched} finds no result in flight")
    elif overlaps and order.index(f"process {handled}") > order.index(f"run {launched}"):
        out.append(f"overlap: launch {launched} is under way while result {handled} is handled")
    elif overlaps:
        out.append(f"result {handled} is handled before launch {launched}")
    elif launched is None and handled is not None:
        out.append(f"nothing is launched, so only result {handled} is handled")
    if "delayed_sample" in order:
        waits = f" and waits for result {handled}" if handled is not None else ""
        out.append(f"delayed sampling: launch {launched} has a grammar row{waits}")
    if "idle" in order:
        out.append("idle: nothing to launch and nothing in flight")
    return out


def totals(recorder: Recorder) -> list[Text]:
    trace = recorder.trace()
    tokens = sum(map(len, trace["outputs"].values()))
    line = f"{trace['forward_steps']} launches, {tokens} tokens, {len(trace['turns'])} turns"
    ends = [f"{rid} {why}" for rid, why in trace["finished"].items()]
    return [Text(line, "bold"), *labelled("ended", ends)]
