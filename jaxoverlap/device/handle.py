"""Handle: a launch on its way through the device."""

from __future__ import annotations

import jax

from jaxoverlap.core import Launch
from jaxoverlap.device import fetching
from jaxoverlap.device.buckets import Bucket
from jaxoverlap.device.logprobs import DetailsHandle
from jaxoverlap.device.step import Logits, Outputs


class Handle:
    """A step on its way; opaque to callers."""

    __slots__ = ("bucket", "details", "drafts", "launch", "logits", "outputs")

    def __init__(self, launch: Launch, bucket: Bucket) -> None:
        self.launch = launch
        self.bucket = bucket
        self.outputs: Outputs | None = None
        self.logits: Logits | None = None  # until sampled
        self.drafts: jax.Array | None = None  # int32 [drafts, B], of a verify step until it is scored
        self.details: DetailsHandle | None = None

    def send_back(self, outputs: Outputs) -> None:
        self.outputs = outputs
        fetching.start(outputs.fetched)

    def is_ready(self) -> bool:
        """Whether it is sampled and done; asked several times a turn while tracing is on."""
        if self.outputs is None or not self.outputs.fetched.is_ready():  # type: ignore[attr-defined]
            return False
        return self.details is None or all(x.is_ready() for x in self.details.arrays)  # type: ignore[attr-defined]

    def arrays(self) -> list[jax.Array]:
        """What has been launched, as far as it goes back to the host; of a launch not sampled yet its logits."""
        if self.outputs is not None:
            first = self.outputs.fetched
        else:
            assert self.drafts is not None or self.logits is not None
            first = self.drafts if self.drafts is not None else self.logits[0]  # type: ignore[index]
        return [first] if self.details is None else [first, *self.details.arrays]
