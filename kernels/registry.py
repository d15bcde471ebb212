"""Which implementation serves an op: (op, device, dtype) -> function, and why each other one was refused.

Ops that work on KV pages are asked for by the pages' formats too, attention also by the backend that people may name
(`--attention-backend`), linear layers by one that `--batch-invariant` names. A provider module lists `CANDIDATES`, best
first. `choose` asks them in order and takes the first that accepts; every other one leaves a `Refused` with its reason
in words, for the start-up block and whoever asks why a machine is slow.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from configs.kv import KVFormat

PROVIDERS = (
    "kernels.cpu.attention",
    "kernels.cpu.store",
    "kernels.cpu.linear",
    "kernels.cpu.elementwise",
    "kernels.cpu.softmax",
    "kernels.cpu.truncation",
    "kernels.flash",
    "kernels.triton.offers",
    "kernels.reference",
)
"""Modules with a `CANDIDATES` tuple, in order of preference. The reference comes last and accepts everything."""

KVFormats = tuple[KVFormat, KVFormat]
"""(of K, of V)"""

AUTO = "auto"
"""The backend that people name who leave the choice to `choose`."""
DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}
"""Types of devices, as people read them."""
INVARIANT = "batch-invariant"
"""The backend of linear layers that give a row the same bits in any company on a GPU too (`--batch-invariant`)."""


@dataclass(frozen=True)
class Accepted:
    """The candidate serves: `function` has the signature of the op in `kernels.ops`."""

    function: Callable[..., Any]


@dataclass(frozen=True)
class Refused:
    """The candidate does not serve here."""

    reason: str


@dataclass(frozen=True)
class Candidate:
    """One implementation of one op."""

    op: str
    name: str
    """As people read it: "C++ AMX bf16", "torch reference"."""
    offer: Callable[[str, torch.dtype], Accepted | Refused]
    """(device type, dtype) -> the function, or why not. May be slow (compile, probe): asked once a process."""
    refuses: Callable[[torch.dtype, KVFormats], str | None] | None = None
    """(dtype of q, k and v, formats of pages) -> why it cannot work on such pages, or None. Without it: on all."""
    backend: str | None = None
    """To which of the backends it belongs that people may name; of an op for which they may name none: None."""
    on_request: bool = False
    """It serves only where its backend is named."""
    device: str | None = None
    """The only type of device that it is for: "cpu", "cuda"; on others it is not asked, and nobody misses it. None: on
    any."""


@dataclass(frozen=True)
class Choice:
    """What serves an op on a device in a dtype."""

    op: str
    device: str
    dtype: torch.dtype
    name: str
    function: Callable[..., Any]
    refused: tuple[tuple[str, str], ...]
    """(name, reason) of each other candidate, in order of preference."""
    better: tuple[tuple[str, str], ...]
    """(name, reason) of each candidate for such devices that would have been preferred, had it not refused."""

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {reason}" for name, reason in self.refused)
        return f"{self.op}: {self.name}" + (f" (not {others})" if others else "")


class NoImplementation(RuntimeError):
    """No candidate accepts. The message lists what was tried and why each was refused."""

    def __init__(self, message: str, refused: tuple[tuple[str, str], ...]) -> None:
        super().__init__(message)
        self.refused = refused
        """(name, reason) of each candidate."""


@functools.cache
def candidates(op: str) -> tuple[Candidate, ...]:
    """All implementations of `op`, best first."""
    modules = [importlib.import_module(name) for name in PROVIDERS]
    return tuple(candidate for module in modules for candidate in module.CANDIDATES if candidate.op == op)


@functools.cache
def choose(op: str, device: str, dtype: torch.dtype, formats: KVFormats | None = None, backend: str = AUTO) -> Choice:
    """The implementation that serves `op` on `device` ("cpu", "cuda") in `dtype`. Raises NoImplementation.

    formats: of the pages, where the op works on any; None: whatever they may be. backend: whose it must be.
    """
    return choose_among(candidates(op), op, device, dtype, formats, backend)


def choose_among(
    candidates: Iterable[Candidate],
    op: str,
    device: str,
    dtype: torch.dtype,
    formats: KVFormats | None = None,
    backend: str = AUTO,
) -> Choice:
    """The first of `candidates` that accepts. Raises NoImplementation."""
    chosen: tuple[str, Callable[..., Any]] | None = None
    refused, better = [], []
    for candidate in candidates:
        offer = _offer(candidate, device, dtype, formats, backend)
        if isinstance(offer, Refused):
            refused.append((candidate.name, offer.reason))
            if chosen is None and candidate.device in (None, device):
                better.append(refused[-1])
        elif chosen is None:
            chosen = candidate.name, offer.function
        else:
            refused.append((candidate.name, f"{chosen[0]} is preferred"))
    if chosen is None:
        tried = "; ".join(f"{name}: {reason}" for name, reason in refused) or "no candidates"
        raise NoImplementation(f"nothing implements {op} on {device} in {dtype} ({tried})", tuple(refused))
    return Choice(op, device, dtype, *chosen, tuple(refused), tuple(better))


def named(backend: str) -> str:
    """Why a candidate of another backend does not serve."""
    return f"--{INVARIANT}" if backend == INVARIANT else f"--attention-backend {backend}"


def _offer(
    candidate: Candidate, device: str, dtype: torch.dtype, formats: KVFormats | None, backend: str
) -> Accepted | Refused:
    if backend not in (AUTO, candidate.backend):
        return Refused(named(backend))
    if candidate.device not in (None, device):
        return Refused(f"runs on {DEVICES[candidate.device]}, not on {device}")
    if backend == AUTO and candidate.on_request:
        return Refused(f"on request only ({named(str(candidate.backend))})")
    offer = candidate.offer(device, dtype)
    if isinstance(offer, Accepted) and formats is not None and candidate.refuses is not None:
        reason = candidate.refuses(dtype, formats)
        return offer if reason is None else Refused(reason)
    return offer
