"""Norms, rotary embedding, gates, rows of tables on the CPU in C++ (`csrc/elementwise.h`). Contracts: `kernels.ops`."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.offers import native_candidates
from kernels.cpu.program import Call, Entry, fresh
from kernels.ops import Gate

ISAS = {
    torch.float32: ("baseline", "avx2", "avx512"),
    torch.bfloat16: ("baseline", "avx2", "avx512", "avx512bf16"),
}
"""Instruction sets that the sources have."""

GATES: dict[Gate, int] = {"silu": 1, "gelu_tanh": 2}
"""As in `csrc/numbers.h`."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class NormCall(Call):
    """Mirror of the struct in `csrc/elementwise.h`."""

    rows_ = "rows"
    _fields_ = (
        *(("x", _PTR), ("x_stride", _I64), ("residual", _PTR), ("residual_stride", _I64)),
        *(("weight", _PTR), ("wide_weight", _I64), ("eps", ctypes.c_float)),
        *(("rows", _I64), ("heads", _I64), ("width", _I64), ("out", _PTR), ("out_stride", _I64)),
    )


class RotaryCall(Call):
    """Mirror of the struct in `csrc/elementwise.h`."""

    rows_ = "tokens"
    _fields_ = (
        *(("q", _PTR), ("q_stride", _I64), ("q_heads", _I64)),
        *(("k", _PTR), ("k_stride", _I64), ("k_heads", _I64), ("dims", _I64)),
        *(("positions", _PTR), ("cos", _PTR), ("sin", _PTR), ("half", _I64), ("tokens", _I64)),
    )


class GateMulCall(Call):
    """Mirror of the struct in `csrc/elementwise.h`."""

    rows_ = "rows"
    _fields_ = (("x", _PTR), ("x_stride", _I64), ("half", _I64), ("rows", _I64), ("gate", _I64), ("out", _PTR))


class GatherRowsCall(Call):
    """Mirror of the struct in `csrc/elementwise.h`."""

    rows_ = "rows"
    _fields_ = (
        *(("table", _PTR), ("table_stride", _I64), ("indices", _PTR), ("rows", _I64), ("width", _I64)),
        *(("scale", ctypes.c_float), ("out", _PTR)),
    )


@dataclass(frozen=True, slots=True)
class NativeNorm:
    """`rms_norm`."""

    entry: Entry

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, heads, width = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        out = fresh(x.shape, x.dtype)
        # fmt: off
        self.entry(NormCall(
            x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), weight.dtype is torch.float32, eps, rows, heads,
            width, out.data_ptr(), heads * width,
        ))
        # fmt: on
        return out


@dataclass(frozen=True, slots=True)
class NativeAddNorm:
    """`add_rms_norm`."""

    entry: Entry

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        out = fresh((rows, width), x.dtype)
        # fmt: off
        self.entry(NormCall(
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(),
            weight.dtype is torch.float32, eps, rows, 1, width, out.data_ptr(), width,
        ))
        # fmt: on
        return out


@dataclass(frozen=True, slots=True)
class NativeRotary:
    """`rotary`."""

    entry: Entry

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        tokens, q_heads, dims = q.shape
        # fmt: off
        self.entry(RotaryCall(
            q.data_ptr(), q.stride(0), q_heads, k.data_ptr(), k.stride(0), k.shape[1], dims,
            positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[1], tokens,
        ))
        # fmt: on


@dataclass(frozen=True, slots=True)
class NativeNormRotary:
    """`norm_rotary`: the norms one by one, in place, then `rotary`."""

    norm: Entry
    rotary: NativeRotary

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        for x, weight in ((q, q_weight), (k, k_weight)):
            # fmt: off
            self.norm(NormCall(
                x.data_ptr(), x.stride(0), None, 0, weight.data_ptr(), weight.dtype is torch.float32, eps, *x.shape,
                x.data_ptr(), x.stride(0),
            ))
            # fmt: on
        self.rotary(q, k, positions, cos, sin)


@dataclass(frozen=True, slots=True)
class NativeGateMul:
    """`gate_mul`."""

    entry: Entry

    def __call__(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        rows, width = x.shape
        out = fresh((rows, width // 2), x.dtype)
        self.entry(GateMulCall(x.data_ptr(), x.stride(0), width // 2, rows, GATES[gate], out.data_ptr()))
        return out


@dataclass(frozen=True, slots=True)
class NativeGatherRows:
    """`gather_rows`."""

    entry: Entry

    def __call__(self, table: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
        rows, width = indices.shape[0], table.shape[1]
        out = fresh((rows, width), table.dtype)
        # fmt: off
        self.entry(GatherRowsCall(
            table.data_ptr(), table.stride(0), indices.data_ptr(), rows, width, scale, out.data_ptr(),
        ))
        # fmt: on
        return out


def _make_norm_rotary(native: NativeLibrary, ending: str) -> NativeNormRotary:
    return NativeNormRotary(Entry(native, f"norm_{ending}"), NativeRotary(Entry(native, f"rotary_{ending}")))


def _make(wrapper: Callable[[Entry], Any], entry: str) -> Callable[[NativeLibrary, str], Any]:
    return lambda native, ending: wrapper(Entry(native, f"{entry}_{ending}"))


CANDIDATES = (
    *native_candidates("rms_norm", "norm", ISAS, _make(NativeNorm, "norm")),
    *native_candidates("add_rms_norm", "norm", ISAS, _make(NativeAddNorm, "norm")),
    *native_candidates("rotary", "rotary", ISAS, _make(NativeRotary, "rotary")),
    *native_candidates("norm_rotary", "norm", ISAS, _make_norm_rotary),
    *native_candidates("gate_mul", "gate_mul", ISAS, _make(NativeGateMul, "gate_mul")),
    *native_candidates("gather_rows", "gather_rows", ISAS, _make(NativeGatherRows, "gather_rows")),
)
