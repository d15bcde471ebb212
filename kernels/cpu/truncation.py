"""Draws from truncated rows on the CPU in C++ (`csrc/truncation.cpp`). Contract: `kernels.ops`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cpu import library
from kernels.registry import Accepted, Candidate, Refused

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_DRAW_TRUNCATED = (_PTR, _PTR, _I64, _I64, _I64, _PTR, _I64, _PTR, _PTR, _PTR, _PTR, _PTR)


@dataclass(frozen=True, slots=True)
class NativeDraw:
    """`draw_truncated`."""

    entry: Callable[..., int]

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        rows: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        drawn = torch.empty_like(rows)
        # fmt: off
        failed = self.entry(
            x.data_ptr(), weights.data_ptr(), x.stride(0), weights.stride(0), x.shape[1], rows.data_ptr(), len(rows),
            top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), uniform.data_ptr(), drawn.data_ptr(),
        )
        # fmt: on
        if failed:
            raise MemoryError("no memory to find what is left of a row")
        return drawn


def _offer(device: str, dtype: torch.dtype) -> Accepted | Refused:
    """Most of the work is scalar: one entry serves all instruction sets."""
    native = library.load()
    if native is None:
        return Refused(library.refusal() or "not loaded")
    return Accepted(NativeDraw(native.function("draw_truncated", _DRAW_TRUNCATED, ctypes.c_int32)))


CANDIDATES = (Candidate("draw_truncated", "C++", _offer, device="cpu"),)
