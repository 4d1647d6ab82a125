"""A scheduler and a NumPy device, turned by hand."""

from __future__ import annotations

import numpy as np
from host_runner import HostRunner, oracle

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Launch, Request, Sample, Sync, Wait
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler import Scheduler

EOS = 2
VOCAB = 1000


def text_of(ids):
    return "".join(f"<{t}>" for t in ids)


class Harness:
    def __init__(self, context_length=512, scripts=None, grammar_backend=None, observer=None, **config):
        config = {"model_path": "checksum", "max_total_tokens": 256, "max_running_requests": 4, "audit": True, **config}
        self.config = EngineConfig(**config)
        self.scripts = scripts or {}
        self.scheduler = Scheduler(
            self.config,
            max_total_tokens=self.config.max_total_tokens,
            context_length=context_length,
            vocab_size=VOCAB,
            decode=text_of,
            grammar_backend=grammar_backend,
            observer=observer,
        )
        self.runner = HostRunner(
            rows=self.config.max_running_requests + 1,
            context_length=context_length,
            num_pages=self.config.max_total_tokens // self.config.page_size,
            page_size=self.config.page_size,
            scripts=self.scripts,
            drafts=self.config.speculative_num_draft_tokens,
        )
        self.requests: dict[str, Request] = {}
        self.streamed: dict[str, list[int]] = {}
        self.final: dict[str, int] = {}

    def submit(self, rid, prompt, max_new_tokens=8, stream=True, priority=None, seed=0, **params):
        p = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **params)
        request = Request(
            rid=rid,
            prompt_ids=np.array(prompt, np.int32),
            params=p,
            stream=stream,
            priority=priority,
            seed=seed,
            stop_ids=() if p.ignore_eos else (EOS, *p.stop_token_ids),
        )
        self.requests[rid] = request
        self.scheduler.submit(request)
        return request

    def turn(self):
        """One turn; returns what the loop asked for, in order."""
        asked, answer = [], None
        generator = self.scheduler.turn()
        try:
            while True:
                x = generator.send(answer)
                asked.append(x)
                answer = self.answer(x)
        except StopIteration:
            pass
        self.collect()
        return asked

    def answer(self, x):
        match x:
            case Launch():
                return self.runner.launch([x])[0]
            case Sample():
                return self.runner.sample([x])
            case Wait():
                return self.runner.wait(x.handle)
            case Sync():
                return x.facts

    def collect(self):
        while self.scheduler.outputs:
            output = self.scheduler.outputs.popleft()
            rid = output.request.rid
            assert rid not in self.final, f"{rid} was told something after its end"
            told = self.streamed.setdefault(rid, [])
            assert output.completion_tokens >= len(told) or output.finished, f"{rid}: the count went back"
            self.streamed[rid] = [int(t) for t in output.request.output_ids[: output.completion_tokens]]
            if output.finished:
                assert output.request.finished
                self.final[rid] = output.completion_tokens

    def run(self, limit=5000):
        """Turns until nothing is left."""
        for _ in range(limit):
            if self.scheduler.is_idle:
                return self
            self.turn()
        raise AssertionError(f"not done after {limit} turns: {[r.rid for r in self.scheduler.waiting]} wait")

    def outputs(self, rid):
        r = self.requests[rid]
        return [int(t) for t in r.output_ids[: r.shown_len]]

    def expected(self, rid):
        """The oracle's answer: cut at the cap, a stop id, or the token that completes a stop string."""
        r = self.requests[rid]
        want = oracle(r.prompt_ids.tolist(), r.max_new_tokens, r.stop_ids, self.scripts.get(rid))
        for n in range(1, len(want) + 1):
            if any(stop in text_of(want[:n]) for stop in r.params.stop):
                return want[:n]
        return want

    def stops(self, rid):
        r, want = self.requests[rid], self.expected(rid)
        return bool(want) and (want[-1] in r.stop_ids or any(stop in text_of(want) for stop in r.params.stop))

    def check(self, aborted=()):
        """Every request ended, equals the oracle (a prefix of it when aborted), and gave everything back."""
        for rid, r in self.requests.items():
            assert r.finished, f"{rid} never ended"
            assert rid in self.final, f"{rid} was never told its end"
            got, want = self.outputs(rid), self.expected(rid)
            if rid in aborted:
                assert got == want[: len(got)], rid
                continue
            assert got == want, rid
            assert r.finish_reason.type in self.reasons(rid), rid
        assert self.scheduler.slots.num_free == self.scheduler.slots.num_slots
        kv = self.scheduler.kv
        assert kv.pages.available_tokens + kv.tree.evictable_tokens == self.scheduler.max_total_tokens
        assert kv.tree.protected_tokens == 0

    def reasons(self, rid):
        if not self.stops(rid):
            return {"length"}
        at_cap = len(self.expected(rid)) == self.requests[rid].max_new_tokens
        if self.config.finish_order == "stop-first" or not (at_cap or self.config.speculative_num_draft_tokens):
            return {"stop"}
        return {"length"} if at_cap else {"length", "stop"}  # one run of a verify step may reach stop and cap
