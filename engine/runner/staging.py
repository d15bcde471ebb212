"""How a step's small arrays become tensors: in one buffer, each at a multiple of 64 bytes.

On the CPU (`HostStaging`) the tensors are views of the buffer that the host writes, and nothing is copied. Each array
begins where that of every other step does, as `recorded` needs it.

    values ──> host buffer (one of two) ── one copy, not waited for ──> device buffer ──> views, which the model reads

To a device (`DeviceStaging`) they go one behind another, so that the copy is short; where an array begins depends on
the lengths of those before it, so steps of one size have theirs at the same places, as `graphs` needs it. The host runs
ahead: a buffer is filled again only when the copy that read it has ended, which was started two steps ago. The device
buffer needs no such care, since copies and kernels run in one stream, in order.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.runner.link import Link

ALIGNMENT = 8
"""Words of 8 bytes: each array begins at a multiple of 64 bytes, as kernels like it."""


class HostStaging:
    """`begin`, then arrays in the order of their places: the tensors hold their values until the next `begin`."""

    def __init__(self, places: Sequence[int]) -> None:
        """places: of each of a step's arrays the most words of 8 bytes."""
        *self._starts, words = itertools.accumulate(map(_aligned, places), initial=0)
        self._tensor = torch.zeros(words, dtype=torch.int64)
        self._tensor_halves = self._tensor.view(torch.int32)
        self._words: npt.NDArray[np.int64] = self._tensor.numpy()
        self._halves: npt.NDArray[np.int32] = self._words.view(np.int32)
        self._place = 0

    def begin(self) -> None:
        """Forgets the last step's arrays."""
        self._place = 0

    def int64(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """int64 [n], from integers [n]."""
        start = self._next()
        end = start + len(values)
        self._words[start:end] = values
        return self._tensor[start:end]

    def int32(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """int32 [n], from integers [n] that fit."""
        return self.table(values[None], len(values))[0]

    def table(self, values: npt.NDArray[Any], stride: int) -> torch.Tensor:
        """int32 [n, m], from integers that fit; rows are `stride` >= m numbers apart."""
        rows, width = values.shape
        start = 2 * self._next()
        end = start + rows * stride
        self._halves[start:end].reshape(rows, stride)[:, :width] = values
        return self._tensor_halves[start:end].view(rows, stride)[:, :width]

    def _next(self) -> int:
        """The first word of the next place."""
        self._place += 1
        return self._starts[self._place - 1]


class _Outgoing:
    """Host memory that can be sent, seen as numbers of each kind."""

    def __init__(self, words: torch.Tensor) -> None:
        self.tensor = words
        self.int64: npt.NDArray[np.int64] = words.numpy()
        self.int32: npt.NDArray[np.int32] = self.int64.view(np.int32)
        self.float32: npt.NDArray[np.float32] = self.int64.view(np.float32)
        self.wait: Callable[[], None] = _nothing


class DeviceStaging:
    """`begin`, then arrays, then `send`: from then on the tensors hold their values for all that is launched before the
    next `send`."""

    def __init__(self, words: int, num_arrays: int, device: torch.device, link: Link) -> None:
        """words: of 8 bytes, the most that all of a step's arrays take, of which there are no more than so many."""
        words += num_arrays * ALIGNMENT
        self._hosts = [_Outgoing(link.buffer(words)) for _ in range(2)]
        self._host = self._hosts[0]
        self._int64 = torch.zeros(words, dtype=torch.int64, device=device)
        self._int32, self._float32 = self._int64.view(torch.int32), self._int64.view(torch.float32)
        self._link, self._used = link, 0

    def begin(self) -> None:
        """Forgets the last step's arrays."""
        self._host = host = self._hosts.pop(0)
        self._hosts.append(host)
        host.wait()
        self._used = 0

    def int64(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """int64 [n] on the device, from integers [n]."""
        start = self._take(len(values))
        self._host.int64[start : start + len(values)] = values
        return self._int64[start : start + len(values)]

    def int32(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """int32 [n] on the device, from integers [n] that fit."""
        start = 2 * self._take(-(-len(values) // 2))
        self._host.int32[start : start + len(values)] = values
        return self._int32[start : start + len(values)]

    def float32(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """fp32 [n] on the device, from numbers [n]."""
        start = 2 * self._take(-(-len(values) // 2))
        self._host.float32[start : start + len(values)] = values
        return self._float32[start : start + len(values)]

    def _take(self, words: int) -> int:
        start = self._used
        self._used += _aligned(words)
        return start

    def send(self) -> None:
        """All arrays, in one copy."""
        self._host.wait = self._link.send(self._host.tensor[: self._used], self._int64[: self._used])


def _aligned(words: int) -> int:
    return (words + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _nothing() -> None:
    """Nobody reads the buffer."""
