"""Decode steps captured once and launched whole: a small model's step is hundreds of short kernels, and telling a GPU
of each takes the host longer than many of them run.

A graph has one size, in sequences (`configs.graphs.decode_sizes`): a step of fewer is padded to the next one. The
largest is captured first, so that the smaller ones find memory enough in what it leaves. Prompts and mixed steps, whose
tensors have too many shapes, are launched kernel by kernel.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from engine.messages import StepPlan
from engine.runner.link import Link, Work


class DecodeGraphs:
    """None at first: then no step fits."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sizes: list[int] = []
        self._replays: dict[int, Callable[[], None]] = {}
        self.seconds, self.nbytes = 0.0, 0
        """What capturing took."""

    def capture(self, sizes: Sequence[int], work_of: Callable[[int], Work]) -> None:
        """work_of: a step of so many sequences, whose inputs are where those of every other such step are."""
        start, before = time.monotonic(), self._link.bytes_in_use()
        for size in sorted(sizes, reverse=True):
            self._replays[size] = self._link.capture(work_of(size))
        self._sizes = sorted(sizes)
        self.seconds, self.nbytes = time.monotonic() - start, self._link.bytes_in_use() - before

    def size_for(self, plan: StepPlan) -> int | None:
        """The size to pad a step to; None: it has to be launched kernel by kernel."""
        if not all(plan.samples) or max(plan.num_tokens) > 1 or plan.scored_slots:
            return None
        place = bisect_left(self._sizes, len(plan.slots))
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> None:
        self._replays[size]()

    def __str__(self) -> str:
        """For the start-up block."""
        return (
            f"{len(self._sizes)} sizes up to {self._sizes[-1]} sequences, captured in {self.seconds:.1f} s, "
            f"{self.nbytes / 2**20:.0f} MiB"
        )
