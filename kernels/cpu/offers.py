"""How entries of the native library become candidates of `kernels.registry`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernels.cpu import library
from kernels.cpu.library import ISA_TITLES, ISAS, NativeLibrary
from kernels.registry import Accepted, Candidate, KVFormats, Refused

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Dtypes that the native code computes in, by the name that entries carry."""

Make = Callable[[NativeLibrary, str], Callable[..., Any]]
"""(library, ending of the entry: "bf16_avx2") -> the function that serves an op."""

Refuses = Callable[[str, torch.dtype, KVFormats], str | None]
"""`Candidate.refuses` of an instruction set."""


def native_candidates(
    op: str, entry: str, isas: Mapping[torch.dtype, tuple[str, ...]], make: Make, refuses: Refuses | None = None
) -> tuple[Candidate, ...]:
    """`op` by entries `octavo_{entry}_{kind}_{isa}`, the strongest instruction set first.

    isas: those that the sources have, by dtype.
    """
    used = [isa for isa in reversed(ISAS) if any(isa in some for some in isas.values())]
    return tuple(
        Candidate(
            op,
            f"C++ {ISA_TITLES[isa]}",
            _offer(entry, isa, isas, make),
            functools.partial(refuses, isa) if refuses else None,
            backend="cpu",
            device="cpu",
        )
        for isa in used
    )


def _offer(
    entry: str, isa: str, isas: Mapping[torch.dtype, tuple[str, ...]], make: Make
) -> Callable[[str, torch.dtype], Accepted | Refused]:
    def offer(device: str, dtype: torch.dtype) -> Accepted | Refused:
        if isa not in isas.get(dtype, ()):
            return Refused(f"does not compute in {str(dtype).removeprefix('torch.')}")
        native = library.load()
        if native is None:
            return Refused(library.refusal() or "not loaded")
        kind = KINDS[dtype]
        if reason := native.refusal(f"{entry}_{kind}", isa):
            return Refused(reason)
        return Accepted(make(native, f"{kind}_{isa}"))

    return offer
