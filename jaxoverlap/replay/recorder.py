"""Writes down what a scheduler does, turn by turn, in the traces' format (tests/conformance/README.md)."""

from __future__ import annotations

from typing import Any

from jaxoverlap.core import FinishReason, ForwardMode, Launch, Request, Sample, StepResult
from jaxoverlap.scheduler import Scheduler


class Recorder:
    """One rank's trace. It is the scheduler's observer and hears of launches, samplings and results from the driver."""

    def __init__(self, speculative: bool) -> None:
        self.speculative = speculative
        self.turns: list[dict[str, Any]] = []
        self.reasons: list[list[str]] = []  # of each turn: why it went as it did
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.verify_of: dict[int, dict[str, Any]] = {}
        self.launches = 0
        self.now: dict[str, Any] = {}

    def begin(self, turn: int) -> None:
        self.now = {"turn": turn, "order": []}
        self.reasons.append([])

    # from the scheduler

    def note(self, event: str, number: int | None) -> None:
        self.now["order"].append(event if number is None else f"{event} {number}")

    def row(self, event: str, request: Request, tokens: list[int]) -> None:
        rid = request.rid
        if event == "committed":
            self.now.setdefault("committed", {}).setdefault(rid, []).extend(tokens)
            self.outputs.setdefault(rid, []).extend(tokens)
        elif event == "finished":
            assert request.finish_reason is not None
            self.now.setdefault("finished", {})[rid] = self.finished[rid] = reason_text(request.finish_reason)
        elif event in ("dropped", "middle_chunk", "retracted"):
            self.now.setdefault(event, []).append(rid)
        if event == "dropped":
            self.reason(f"{rid}'s result is dropped: it was {'put back' if request.is_retracted else 'over'} before")

    def reason(self, text: str) -> None:
        self.reasons[-1].append(text)

    # from the driver

    def launched(self, launch: Launch) -> None:
        self.launches += 1
        self.now["batch"] = describe(launch)
        self.note("run", launch.number)
        if launch.delay_sample:
            self.now["delay_sample"] = True
        elif self.verifies(launch):
            self.note("verify", None)
            record: dict[str, Any] = {"rids": [r.rid for r in launch.requests]}
            record |= {"accept_lens": [], "seq_lens_in": [], "bonus_in": []}
            self.now.setdefault("verify", []).append(record)
            self.verify_of[launch.number] = record
        elif launch.mode is not ForwardMode.IDLE and not launch.is_prefill_only:
            self.note("sample", None)

    def verifies(self, launch: Launch) -> bool:
        idle_beside_verify = launch.mode is ForwardMode.IDLE and not launch.is_extend_in_batch
        return self.speculative and (launch.mode.is_decode or idle_beside_verify)

    def sampled(self, sample: Sample) -> None:
        self.note("delayed_sample", None)
        self.note("sample", None)

    def result(self, launch: Launch, result: StepResult) -> None:
        if launch.number in self.verify_of and result.accept_lens is not None:
            assert result.seq_lens_in is not None
            assert result.bonus_in is not None
            self.verify_of[launch.number].update(
                accept_lens=result.accept_lens.tolist(),
                seq_lens_in=result.seq_lens_in.tolist(),
                bonus_in=result.bonus_in.tolist(),
            )

    def end(self, s: Scheduler, overlap_disabled: bool) -> None:
        for output in s.outputs:
            if output.request.finish_reason is None or output.request.rid in self.finished:
                told = output.request.finished_len if output.finished else output.completion_tokens
                self.now.setdefault("stream", {})[output.request.rid] = told
        s.outputs.clear()
        if overlap_disabled:
            self.now["overlap_disabled"] = True
        if s.is_paused:
            self.reason("paused: nothing is composed")
        self.now["end"] = pools(s)
        self.turns.append(self.now)

    def trace(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "outputs": self.outputs,
            "finished": self.finished,
            "forward_steps": self.launches,
        }


def reason_text(reason: FinishReason) -> str:
    return f"stop:{reason.matched}" if reason.type == "stop" else reason.type


def describe(launch: Launch) -> dict[str, Any]:
    rids = [r.rid for r in launch.requests]
    batch: dict[str, Any] = {"mode": launch.mode.name, "rids": rids}
    if launch.mode.is_extend:
        assert launch.extend_lens is not None
        assert launch.prefix_lens is not None
        batch |= {"extend_lens": launch.extend_lens.tolist(), "prefix_lens": launch.prefix_lens.tolist()}
    batch["seq_lens"] = launch.seq_lens.tolist()
    if launch.mode.is_extend and launch.chunked is not None:
        batch["chunked"] = launch.chunked.rid
    if launch.num_decoding:
        batch["decoding"] = rids[launch.num_prefill :]
    if launch.is_extend_in_batch:
        batch["is_extend_in_batch"] = True
    if launch.global_num_tokens is not None:
        batch["global_num_tokens"] = list(launch.global_num_tokens)
    batch["slots"] = launch.slots.tolist()
    return batch


def pools(s: Scheduler) -> dict[str, Any]:
    return {
        "free_kv": s.kv.pages.available_tokens,
        "evictable": s.kv.tree.evictable_tokens,
        "protected": s.kv.tree.protected_tokens,
        "free_req_slots": s.slots.num_free,
        "new_token_ratio": round(s.new_token_ratio.value, 6),
        "running": [r.rid for r in s.running_batch.requests],
        "waiting": [r.rid for r in s.waiting],
        "queue_len": len(s.result_queue),
    }
