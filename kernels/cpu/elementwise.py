"""Norms, rotary embedding and gates on the CPU in C++ (`csrc/elementwise.h`). Contracts: `kernels.ops`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates

ISAS = {
    torch.float32: ("baseline", "avx2", "avx512"),
    torch.bfloat16: ("baseline", "avx2", "avx512", "avx512bf16"),
}
"""Instruction sets that the sources have."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_NORM = (_PTR, _I64, _PTR, _I64, _PTR, ctypes.c_float, _I64, _I64, _PTR)
_ROTARY = (_PTR, _I64, _I64, _PTR, _I64, _I64, _PTR, _PTR, _PTR, _I64, _I64)
_SILU_MUL = (_PTR, _I64, _I64, _I64, _PTR)


@dataclass(frozen=True, slots=True)
class NativeNorm:
    """`rms_norm`."""

    entry: Callable[..., None]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        out = x.new_empty((rows, width))
        # fmt: off
        self.entry(
            x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), eps, rows, width, out.data_ptr(),
        )
        # fmt: on
        return out


@dataclass(frozen=True, slots=True)
class NativeAddNorm:
    """`add_rms_norm`."""

    entry: Callable[..., None]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        out = x.new_empty((rows, width))
        # fmt: off
        self.entry(
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(), eps, rows, width,
            out.data_ptr(),
        )
        # fmt: on
        return out


@dataclass(frozen=True, slots=True)
class NativeRotary:
    """`rotary`."""

    entry: Callable[..., None]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        # fmt: off
        self.entry(
            q.data_ptr(), q.stride(0), q.shape[1], k.data_ptr(), k.stride(0), k.shape[1],
            positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], q.shape[0],
        )
        # fmt: on


@dataclass(frozen=True, slots=True)
class NativeSiluMul:
    """`silu_mul`."""

    entry: Callable[..., None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        out = x.new_empty((rows, width // 2))
        self.entry(x.data_ptr(), x.stride(0), width // 2, rows, out.data_ptr())
        return out


def _make(wrapper: Callable[..., Any], entry: str, types: tuple[Any, ...]) -> Callable[[NativeLibrary, str], Any]:
    return lambda native, ending: wrapper(native.function(f"{entry}_{ending}", types))


CANDIDATES = (
    *native_candidates("rms_norm", "norm", ISAS, _make(NativeNorm, "norm", _NORM)),
    *native_candidates("add_rms_norm", "norm", ISAS, _make(NativeAddNorm, "norm", _NORM)),
    *native_candidates("rotary", "rotary", ISAS, _make(NativeRotary, "rotary", _ROTARY)),
    *native_candidates("silu_mul", "silu_mul", ISAS, _make(NativeSiluMul, "silu_mul", _SILU_MUL)),
)
