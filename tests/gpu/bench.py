"""What sections compute on, and how they time and compare."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from error_rule import allowed_error, error_of
from gpu.findings import Findings

REPEATS = 20
"""Runs that must have the same bits: what one order of programs hides another may show."""
GAP = 16
"""Numbers between rows. Triton compiles one kernel for strides that are multiples of 16, as a model's are, and another
one for other strides."""
PRODUCTS_ERROR = 2.0**-19
"""Of a sum of fp32 products: what it may be off by, for Euclidean norms of its factors of 1."""
COLD_BYTES = 256 << 20
"""Several times the second-level cache of any GPU: what is read anew after so much comes from memory."""

Call = Callable[[], Any]


@dataclass
class Bench:
    """A device and a place for what is found."""

    findings: Findings
    scratch: Path
    """For what sections find and make; gone when all have run."""
    is_tiny: bool
    """Kernels are interpreted on a CPU: shapes are tiny, and figures mean nothing."""
    share: int = 0
    shares: int = 1
    """Of how many processes this is which."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_tiny else "cuda")

    @property
    def repeats(self) -> int:
        return 2 if self.is_tiny else REPEATS

    def some(self, tiny: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        return tiny if self.is_tiny else full

    def mine(self, tiny: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        """This process's share of the cases."""
        return self.some(tiny, full)[self.share :: self.shares]

    def wait(self) -> None:
        if not self.is_tiny:
            torch.cuda.synchronize()

    def generator(self, seed: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(seed), device=self.device).to(dtype)

    def rows_apart(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers at a row stride of their own, with NaN between rows."""
        rows, width = x.shape[0], x[0].numel()
        wide = torch.full((rows, width + GAP), torch.nan, dtype=x.dtype, device=x.device)
        view = wide[:, :width].unflatten(1, x.shape[1:]) if x.dim() > 2 else wide[:, :width]
        view.copy_(x)
        return view

    @cached_property
    def ceilings(self) -> "Ceilings":
        """What the section of that name has found, else measured now."""
        numbers: dict[str, float] = {}
        for line in Findings.read(self.scratch / "ceilings.json").lines:
            numbers |= line.numbers
        if "copy" not in numbers or "matmul" not in numbers:
            numbers = measure_ceilings(self)
        return Ceilings(numbers["copy"], numbers["matmul"])

    # ---------------------------------------------------------------- bits
    def same_bits(self, what: str, call: Callable[[], torch.Tensor]) -> None:
        """Every run gives what the first gave."""
        first = call().clone()
        different = sum(not equal(call(), first) for _ in range(self.repeats - 1))
        text = f"{self.repeats} runs, same bits" if not different else f"{different} of {self.repeats} runs differ"
        self.findings.verdict(f"{what}, again", not different, text)

    # ---------------------------------------------------------------- time
    def seconds(self, calls: Sequence[Call], captured: bool = True) -> float:
        """Of one call, each of which launches the same on memory of its own. captured: in a CUDA graph, so that what
        the host takes to launch kernels does not count; what brings something to the device cannot be."""
        if self.is_tiny:
            start = time.perf_counter()
            calls[0]()
            return max(time.perf_counter() - start, 1e-9)
        self._in_turn(calls)  # compiles whatever differs in them, which no capture may do
        torch.cuda.synchronize()
        replay = self._captured(calls) if captured else partial(self._in_turn, calls)
        replay()
        rounds = max(1, min(50, int(0.05 / max(self._measured(replay, 1), 1e-6))))
        return min(self._measured(replay, rounds) for _ in range(3)) / rounds / len(calls)

    def _captured(self, calls: Sequence[Call]) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _in_turn(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()

    def _measured(self, call: Call, rounds: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    def copies(self, nbytes: int, most: int = 64) -> int:
        """How many calls, each on `nbytes` of its own, leave nothing of the first in a cache."""
        return 1 if self.is_tiny else max(1, min(most, -(-COLD_BYTES // max(1, nbytes))))

    def bandwidth(
        self,
        what: str,
        nbytes: int,
        calls: Sequence[Call],
        target: float | None = None,
        within: float | None = None,
        captured: bool = True,
    ) -> float:
        """A figure: bytes read and written a second, and their share of what a copy gets. target: of that share;
        within: seconds that it should take at most."""
        seconds = self.seconds(calls, captured)
        rate = nbytes / seconds
        share = rate / self.ceilings.copy
        text = f"{seconds * 1e6:9.1f} us  {rate / 1e12:6.3f} TB/s  {share:6.1%} of a copy"
        if target is not None:
            text += self.aim(f"{target:.0%}", share >= target)
        if within is not None:
            text += self.aim(f"{within * 1e6:g} us", seconds <= within)
        self.findings.figure(what, text, seconds=seconds, bytes_a_second=rate, share=share, target=target)
        return seconds

    def products(self, what: str, operations: int, calls: Sequence[Call], target: float | None = None) -> float:
        """A figure: operations a second, and their share of what a product of matrices gets. target: of that share."""
        seconds = self.seconds(calls)
        rate = operations / seconds
        share = rate / self.ceilings.matmul
        text = f"{seconds * 1e6:9.1f} us  {rate / 1e12:6.1f} TFLOP/s  {share:6.1%} of a matmul"
        if target is not None:
            text += self.aim(f"{target:.0%}", share >= target)
        self.findings.figure(what, text, seconds=seconds, operations_a_second=rate, share=share, target=target)
        return seconds

    def beside(self, other: str, ours: float, theirs: float, target: float | None = None) -> None:
        """A figure: how many times as fast we are, from the seconds that each takes."""
        times = theirs / ours
        text = f"{times:.2f} times as fast" + ("" if target is None else self.aim(f"{target:g}", times >= target))
        self.findings.figure(f"  beside {other}", text, times=times, target=target)

    def aim(self, target: str, is_met: bool) -> str:
        """What was aimed at, in words, and whether it was missed: no failure."""
        return "" if self.is_tiny else f"  (target {target}{'' if is_met else ': MISSED'})"


@dataclass(frozen=True)
class Ceilings:
    """Of this device, measured: what others are graded against."""

    copy: float
    """Bytes read and written a second by a copy of device memory."""
    matmul: float
    """Operations a second of a product of large bf16 matrices."""


def measure_ceilings(bench: Bench) -> dict[str, float]:
    size, width = (1 << 20, 64) if bench.is_tiny else (4 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * size / bench.seconds([lambda: target.copy_(source)])
    a, b = (bench.normal(width, width, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    out = torch.empty_like(a)
    return {"copy": copy, "matmul": 2 * width**3 / bench.seconds([lambda: torch.mm(a, b, out=out)] * 4)}


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """The same bits: NaN equals itself."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(as_bytes(x), as_bytes(y))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def check_error(
    findings: Findings, what: str, found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, times: float = 2
) -> None:
    """flash-attn's rule (`error_rule`)."""
    error, allowed = error_of(found, exact), allowed_error(plain, exact, times)
    findings.verdict(what, error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}", error=error, allowed=allowed)


def check_products(
    findings: Findings, what: str, found: torch.Tensor, exact: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> None:
    """Of fp32, x [T, K] by weight [N, K]. Tensor cores multiply it as three products of tf32 and truncate sums, so more
    than twice plain torch's error may come out though nothing is wrong. One product of tf32 alone, each factor rounded
    by up to 2^-12 of it, is off by many times what is allowed."""
    norms = (float(rows.double().norm(dim=1).max()) for rows in (x, weight))
    error, allowed = error_of(found, exact), math.prod(norms) * PRODUCTS_ERROR
    findings.verdict(what, error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}", error=error, allowed=allowed)


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch hands out unwritten is NaN, or a large number, instead of what happened to be there."""
    empty = torch.empty

    def fill(*size: Any, **kind: Any) -> torch.Tensor:
        made = empty(*size, **kind)
        return made.fill_(torch.nan if made.is_floating_point() else 77)

    with patch.object(torch, "empty", fill):
        yield
