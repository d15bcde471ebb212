"""A device that does what it is told in order, while the host goes on.

    send ─> launch, launch, … ─> fetch          each returns at once; `wait` is the only thing that waits

On a GPU a launch is the calling of kernels: torch hands them to the driver and returns. So nothing here may ask the
device for a number (`.item()`, `.tolist()`, `.cpu()`, a mask used as an index): it would wait for all that was told
before. Tests have a device of their own (`tests/late_device.py`), which does what it was told as late as it can.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], None]
"""Kernels on tensors of the device. What it reads of the host is read when it is launched, or captured."""


class Link(Protocol):
    """One stream of a device."""

    def buffer(self, words: int) -> torch.Tensor:
        """int64 [words] of host memory that can be sent."""

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> Callable[[], None]:
        """Starts a copy to the device. Returns what waits until `source` has been read."""

    def launch(self, work: Work) -> None:
        """Starts the work."""

    def fetch(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts a copy to the host. Returns what waits for all that was told so far, and gives the copy."""

    def capture(self, work: Work) -> Callable[[], None]:
        """Does the work once, then notes it down. Returns what launches it again: the same kernels on the same memory,
        without Python. Results in tensors that the work makes are gone with the next launch of anything captured."""

    def bytes_in_use(self) -> int:
        """Of the device's memory, without what torch keeps for tensors to come."""


class CudaLink:
    """The current stream of a GPU, and page-locked memory, which it copies from and to by itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Of captures."""
        self._pool = torch.cuda.graph_pool_handle()
        """The memory of all that is captured: one after another uses it."""

    def buffer(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, pin_memory=True)

    def send(self, source: torch.Tensor, destination: torch.Tensor) -> Callable[[], None]:
        destination.copy_(source, non_blocking=True)
        read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        read.record(torch.cuda.current_stream(self._device))
        wait: Callable[[], None] = read.synchronize
        return wait

    def launch(self, work: Work) -> None:
        work()

    def fetch(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        arrive = self.send(source, copy)

        def wait() -> torch.Tensor:
            arrive()
            return copy

        return wait

    def capture(self, work: Work) -> Callable[[], None]:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and makes libraries' work spaces, which no capture may do
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def bytes_in_use(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
