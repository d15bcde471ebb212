"""Weights of a softmax over the vocabulary on the CPU in C++ (`csrc/softmax.h`). Contract: `kernels.ops`."""

import ctypes
from dataclasses import dataclass

import torch

from kernels.cpu.offers import native_candidates
from kernels.cpu.program import Call, Entry, fresh
from kernels.ops import LANES

ISAS = {torch.float32: ("baseline", "avx2", "avx512")}
"""Instruction sets that the sources have."""

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class SoftmaxCall(Call):
    """Mirror of the struct in `csrc/softmax.h`."""

    rows_ = "rows"
    _fields_ = (
        *(("x", _PTR), ("x_stride", _I64), ("temperature", _PTR), ("shifted", _PTR), ("shifted_stride", _I64)),
        *(("weights", _PTR), ("weights_stride", _I64), ("rows", _I64), ("groups", _I64), ("sums", _PTR)),
    )


@dataclass(frozen=True, slots=True)
class NativeSoftmaxWeights:
    """`softmax_weights`."""

    entry: Entry

    def __call__(
        self, x: torch.Tensor, temperature: torch.Tensor, shifted: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows, groups = x.shape[0], x.shape[1] // LANES
        sums = fresh((rows, groups), x.dtype)
        # fmt: off
        self.entry(SoftmaxCall(
            x.data_ptr(), x.stride(0), temperature.data_ptr(), shifted.data_ptr(), shifted.stride(0),
            weights.data_ptr(), weights.stride(0), rows, groups, sums.data_ptr(),
        ))
        # fmt: on
        return sums


CANDIDATES = native_candidates(
    "softmax_weights",
    "softmax_weights",
    ISAS,
    lambda native, ending: NativeSoftmaxWeights(Entry(native, f"softmax_weights_{ending}")),
)
