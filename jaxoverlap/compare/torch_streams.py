"""How launches get onto the device and results off it: SGLang's streams, events and pinned memory on CUDA, and plain
calls on the CPU, where PyTorch computes before it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Download(Protocol):
    def is_ready(self) -> bool: ...

    def wait(self) -> np.ndarray: ...


class Streams(Protocol):
    """`upload` and the page table belong to the schedule stream, what runs inside `forward` to the forward stream."""

    device: torch.device

    def read_barrier(self) -> None:
        """What is enqueued from here on may overwrite what earlier forwards read (SGLang's WAR barrier)."""

    def upload(self, array: np.ndarray) -> Tensor: ...

    def forward(self) -> contextlib.AbstractContextManager[None]: ...

    def download(self, tensor: Tensor) -> Download:
        """Inside `forward`."""


class CpuStreams:
    """Everything is done when its call returns: the host's work and the device's cannot overlap."""

    device = torch.device("cpu")

    def read_barrier(self) -> None:
        """Nothing is in flight."""

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def forward(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def download(self, tensor: Tensor) -> Download:
        return _Done(tensor)


class CudaStreams:
    """The waits between streams are on the device; the host blocks in a download's `wait` alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._schedule = torch.cuda.current_stream(device)
        self._forward = torch.cuda.Stream(device)

    def read_barrier(self) -> None:
        self._schedule.wait_stream(self._forward)

    def upload(self, array: np.ndarray) -> Tensor:
        """Through pinned memory of its own, which PyTorch hands on only when the copy is done."""
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._forward.wait_stream(self._schedule)
        with torch.cuda.stream(self._forward):
            yield

    def download(self, tensor: Tensor) -> Download:
        return _Copy(tensor)


class _Done:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def is_ready(self) -> bool:
        return True

    def wait(self) -> np.ndarray:
        return self._tensor.numpy()


class _Copy:
    """On its way into pinned memory, with the event that says when it is there (SGLang's copy_done)."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copy_done = torch.cuda.Event()
        self._copy_done.record()

    def is_ready(self) -> bool:
        return self._copy_done.query()

    def wait(self) -> np.ndarray:
        self._copy_done.synchronize()
        return self._host.numpy()
