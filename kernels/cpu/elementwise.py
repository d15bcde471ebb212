"""Norms, rotary embedding and gates on the CPU in C++ (`csrc/elementwise.h`). Contracts: `kernels.ops`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.ops import Gate

ISAS = {
    torch.float32: ("baseline", "avx2", "avx512"),
    torch.bfloat16: ("baseline", "avx2", "avx512", "avx512bf16"),
}
"""Instruction sets that the sources have."""

GATES: dict[Gate, int] = {"silu": 1, "gelu_tanh": 2}
"""As in `csrc/numbers.h`."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_NORM = (_PTR, _I64, _PTR, _I64, _PTR, _I64, ctypes.c_float, _I64, _I64, _I64, _PTR)
_ROTARY = (_PTR, _I64, _I64, _PTR, _I64, _I64, _I64, _PTR, _PTR, _PTR, _I64, _I64)
_GATE_MUL = (_PTR, _I64, _I64, _I64, _I64, _PTR)


@dataclass(frozen=True, slots=True)
class NativeNorm:
    """`rms_norm`."""

    entry: Callable[..., None]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, heads, width = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        out = x.new_empty(x.shape)
        # fmt: off
        self.entry(
            x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), weight.dtype is torch.float32, eps, rows, heads,
            width, out.data_ptr(),
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
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
            weight.dtype is torch.float32, eps, rows, 1, width, out.data_ptr(),
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
        tokens, q_heads, dims = q.shape
        # fmt: off
        self.entry(
            q.data_ptr(), q.stride(0), q_heads, k.data_ptr(), k.stride(0), k.shape[1], dims,
            positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], tokens,
        )
        # fmt: on


@dataclass(frozen=True, slots=True)
class NativeGateMul:
    """`gate_mul`."""

    entry: Callable[..., None]

    def __call__(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        rows, width = x.shape
        out = x.new_empty((rows, width // 2))
        self.entry(x.data_ptr(), x.stride(0), width // 2, rows, GATES[gate], out.data_ptr())
        return out


def _make(wrapper: Callable[..., Any], entry: str, types: tuple[Any, ...]) -> Callable[[NativeLibrary, str], Any]:
    return lambda native, ending: wrapper(native.function(f"{entry}_{ending}", types))


CANDIDATES = (
    *native_candidates("rms_norm", "norm", ISAS, _make(NativeNorm, "norm", _NORM)),
    *native_candidates("add_rms_norm", "norm", ISAS, _make(NativeAddNorm, "norm", _NORM)),
    *native_candidates("rotary", "rotary", ISAS, _make(NativeRotary, "rotary", _ROTARY)),
    *native_candidates("gate_mul", "gate_mul", ISAS, _make(NativeGateMul, "gate_mul", _GATE_MUL)),
)
