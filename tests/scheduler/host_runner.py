"""A device in NumPy that reads tokens through pages, page table and relay rows just as a real one does.

It runs the checksum rule (tests/conformance/README.md), so a wrong page, row, order or count changes what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.core import ForwardMode, Launch, Sample, StepResult
from jaxoverlap.logprobs import LogprobTable

MODULUS = 1_000_003


def checksum(ids):
    h = 7
    for i, t in enumerate(ids):
        h = (h * 31 + (int(t) + 1) * (i % 13 + 1)) % MODULUS
    return h


def next_token(ids):
    return 10 + checksum(ids) % 900


def logprob(context, token):
    """Log-probability of `token` behind `context` on this device: no distribution, but any wrong place shows. Exact in
    float32."""
    return -(checksum([*context, token]) % 4096) / 16


def top_ids(context, k):
    return [(next_token(context) + j) % 1000 for j in range(k)]


def oracle(prompt, n, stops=(), script=None):
    """The first n output tokens, up to and including a stop id; `script` {index: token} overrides the rule."""
    out = []
    for i in range(n):
        out.append((script or {}).get(i, next_token([*prompt, *out])))
        if out[-1] in stops:
            break
    return out


@dataclass
class Handle:
    launch: Launch
    contexts: list | None = None
    inputs: LogprobTable | None = None
    result: StepResult | None = None


@dataclass
class HostRunner:
    """`scripts` {rid: {output index: token}}; `drafts` > 0: verify steps of the traces' toy speculation."""

    rows: int
    context_length: int
    num_pages: int
    page_size: int = 1
    scripts: dict = field(default_factory=dict)
    drafts: int = 0
    max_logprobs: int = 0

    def __post_init__(self):
        self.cache = np.full((self.num_pages + 1) * self.page_size, -1, np.int64)
        self.page_table = np.zeros((self.rows, -(-self.context_length // self.page_size) + 16), np.int64)
        self.relay = np.full(self.rows, -1, np.int64)
        self.lens = np.zeros(self.rows, np.int64)
        self.launches = []

    def launch(self, launches):
        return [self.launch_one(x) for x in launches]

    def launch_one(self, x):
        self.launches.append(x)
        lengths = x.slots, x.seq_lens, x.extend_lens, x.prefix_lens
        assert all(a is None or a.dtype == np.intp for a in lengths)
        slots, index, pages = x.page_writes
        self.page_table[slots, index] = pages
        handle = Handle(x)
        if x.mode is ForwardMode.IDLE:
            handle.result = StepResult(np.zeros(0, np.int32))
        elif x.mode is ForwardMode.DECODE and self.drafts:
            handle.result = self.verify(x)
        else:
            handle.contexts = self.forward(x)
            if x.input_spans is not None:
                handle.inputs = self.input_details(x)
            if not x.delay_sample:
                handle.result = self.pick(x, handle.contexts, x.mask, handle.inputs)
        return [handle][0]

    def loc(self, slot, position):
        return self.page_table[slot, position // self.page_size] * self.page_size + position % self.page_size

    def read(self, slot, n):
        ids = self.cache[self.loc(slot, np.arange(n))]
        assert (ids >= 0).all(), "a position was read that nobody wrote"
        return ids

    def write(self, slot, position, token):
        loc = self.loc(slot, position)
        assert loc >= self.page_size, "page 0 belongs to padding"
        self.cache[loc] = token

    def forward(self, x):
        start, contexts = 0, []
        for i, slot in enumerate(x.slots):
            n = int(x.seq_lens[i])
            if i < x.num_prefill:
                first, count = int(x.prefix_lens[i]), int(x.extend_lens[i])
                assert first + count == n
                for k in range(count):
                    self.write(slot, first + k, x.input_ids[start + k])
                start += count
            else:
                self.write(slot, n - 1, self.relay[slot])
            self.lens[slot] = n
            contexts.append(self.read(slot, n))
        return contexts

    def token(self, request, context, mask):
        index = len(context) - request.prompt_len
        token = self.scripts.get(request.rid, {}).get(index, next_token(context))
        if mask is None or mask[token // 32] >> (token % 32) & 1:
            return token
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[0])

    def table(self, requests, contexts, following=None):
        """A row for each context; `requests` say which ids are chosen."""
        k, n = self.max_logprobs, len(contexts)
        assert k > 0, "details were asked for, and max_logprobs is 0"
        ids = np.array([top_ids(c, k) for c in contexts], np.int32)
        chosen = np.zeros((n, k), np.float32)
        for row, r, c in zip(chosen, requests, contexts):
            wanted = r.details.token_ids if r.details is not None else ()
            row[: len(wanted)] = [logprob(c, t) for t in wanted]
        top = np.array([[logprob(c, t) for t in row] for c, row in zip(contexts, ids)], np.float32)
        behind = None if following is None else np.array([logprob(*pair) for pair in following], np.float32)
        return LogprobTable(top, ids, chosen, behind)

    def input_details(self, x):
        requests, contexts, following = [], [], []
        for i, (first, end) in enumerate(x.input_spans):
            for place in range(x.prefix_lens[i] + first, x.prefix_lens[i] + end):
                requests.append(x.requests[i])
                contexts.append(self.read(x.slots[i], place + 1))
                following.append((contexts[-1], int(x.requests[i].prompt_ids[place + 1])))
        return self.table(requests, contexts, following)

    def pick(self, x, contexts, mask, inputs=None):
        tokens = [
            self.token(r, c, None if mask is None else mask[i, 0]) for i, (r, c) in enumerate(zip(x.requests, contexts))
        ]
        self.relay[x.slots] = tokens
        return StepResult(
            np.array(tokens, np.int32),
            logprobs=np.array([logprob(c, t) for c, t in zip(contexts, tokens)], np.float32),
            output_details=self.table(x.requests, contexts) if x.output_details else None,
            input_details=inputs,
        )

    def verify(self, x):
        n = len(x.requests)
        out, accept = np.zeros((n, self.drafts), np.int32), np.zeros(n, np.int32)
        lens_in, bonus_in = self.lens[x.slots].copy(), self.relay[x.slots].copy()
        for i, (r, slot) in enumerate(zip(x.requests, x.slots)):
            ids = [*self.read(slot, lens_in[i]), bonus_in[i]]
            accept[i] = 1 + checksum(ids) // 900 % self.drafts
            self.write(slot, lens_in[i], bonus_in[i])
            for j in range(self.drafts):
                out[i, j] = self.token(r, ids, None if x.mask is None else x.mask[i, j])
                ids.append(out[i, j])
                if j + 1 < self.drafts:
                    self.write(slot, lens_in[i] + j + 1, out[i, j])
            self.relay[slot] = out[i, accept[i] - 1]
            self.lens[slot] += accept[i]
        return StepResult(out, accept, seq_lens_in=lens_in.astype(np.int32), bonus_in=bonus_in.astype(np.int32))

    def sample(self, samples):
        for x in samples:
            assert isinstance(x, Sample)
            x.handle.result = self.pick(x.launch, x.handle.contexts, x.mask, x.handle.inputs)

    def wait(self, handle):
        assert handle.result is not None, "waited for a launch that was never sampled"
        return handle.result

    def is_ready(self, handle):
        return handle.result is not None
