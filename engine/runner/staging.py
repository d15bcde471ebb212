"""How a step's small arrays reach the device: in one buffer, each at a place of its own, sent in one copy.

    values ──> host buffer (one of two) ── one copy, not waited for ──> device buffer ──> views, which the model reads

On the CPU the views are of the host buffer itself, and nothing is copied. On a GPU the host runs ahead: a buffer is
filled again only when the copy that read it has ended, which was started two steps ago. The device buffer needs no such
care, since copies and kernels run in one stream, in order.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 8
"""Words of 8 bytes: each place begins at a multiple of 64 bytes, as kernels like it."""


class Link(Protocol):
    """The way from host memory to a device."""

    def buffer(self, words: int) -> torch.Tensor:
        """int64 [words] of host memory that can be sent."""

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> Callable[[], None]:
        """Starts a copy, behind what the device was told before. Returns what waits until `source` has been read."""


class CudaLink:
    """Page-locked memory, from which a GPU copies by itself."""

    def buffer(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, pin_memory=True)

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> Callable[[], None]:
        destination.copy_(source, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(torch.cuda.current_stream(destination.device))
        wait: Callable[[], None] = read.synchronize
        return wait


class HostBuffer:
    """Memory of words of 8 bytes, seen as int64 and as int32."""

    def __init__(self, words: torch.Tensor) -> None:
        self.tensor = words
        self.words: npt.NDArray[np.int64] = words.numpy()
        self.halves: npt.NDArray[np.int32] = self.words.view(np.int32)
        self.wait: Callable[[], None] = _nothing


class Staging:
    """`begin`, then arrays in the order of their places, then `send`: the tensors hold their values from `send` until
    the next `begin`."""

    def __init__(self, places: Sequence[int], device: torch.device, link: Link | None) -> None:
        """places: of each of a step's arrays the most words of 8 bytes, those that differ most in length last, as the
        copy ends with the last array; link: None: `device` is the CPU."""
        *self._starts, words = itertools.accumulate(map(_aligned, places), initial=0)
        if link is None:
            self._hosts = [HostBuffer(torch.zeros(words, dtype=torch.int64))]
            self._target = self._hosts[0].tensor
        else:
            self._hosts = [HostBuffer(link.buffer(words)) for _ in range(2)]
            self._target = torch.zeros(words, dtype=torch.int64, device=device)
        self._target_halves = self._target.view(torch.int32)
        self._link, self._host = link, self._hosts[0]
        self._words, self._halves = self._host.words, self._host.halves
        self._place = self._used = 0

    def begin(self) -> None:
        """Forgets the last step's arrays."""
        self._host = host = self._hosts.pop(0)
        self._hosts.append(host)
        host.wait()
        self._words, self._halves = host.words, host.halves
        self._place = self._used = 0

    def int64(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """int64 [n] on the device, from integers [n]."""
        start = self._next()
        self._used = start + len(values)
        self._words[start : self._used] = values
        return self._target[start : self._used]

    def int32(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """int32 [n] on the device, from integers [n] that fit."""
        return self.table(values[None], len(values))[0]

    def table(self, values: npt.NDArray[Any], stride: int) -> torch.Tensor:
        """int32 [n, m] on the device, from integers that fit; on the CPU rows are `stride` >= m numbers apart."""
        rows, width = values.shape
        stride = stride if self._link is None else width  # what is sent is dense
        start = 2 * self._next()
        end = start + rows * stride
        self._halves[start:end].reshape(rows, stride)[:, :width] = values
        self._used = -(-end // 2)
        return self._target_halves[start:end].view(rows, stride)[:, :width]

    def _next(self) -> int:
        """The first word of the next place."""
        self._place += 1
        return self._starts[self._place - 1]

    def send(self) -> None:
        """All arrays to the device, in one copy."""
        if self._link is not None:
            self._host.wait = self._link.send(self._host.tensor[: self._used], self._target[: self._used])


def _aligned(words: int) -> int:
    return (words + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _nothing() -> None:
    """Nobody reads the buffer."""
