"""Linear layer in plain torch. Contract: `kernels.ops`."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels import ops
from kernels.grouped_weight import GroupedWeight
from kernels.ops import Gate
from kernels.reference.elementwise import gate_mul

WIDENED = 2**24
"""Numbers of a weight in codes that are fp32 at a time."""


@dataclass(frozen=True)
class TorchLinear:
    """The weight as it is; `torch.nn.functional.linear` multiplies."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gate: Gate | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] // 2 if self.gate else self.weight.shape[0]

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        assert not (wide and self.gate), ops.GATED_IS_NOT_WIDE
        out = functional.linear(x, self.weight, self.bias)
        out = _gated(out, self.gate) if self.gate else out
        return out.float() if wide else out


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate | None = None) -> TorchLinear:
    return TorchLinear(weight, bias, gate)


@dataclass(frozen=True)
class TorchCodedLinear:
    """Codes become numbers as they are needed, some outputs at a time."""

    weight: ops.CodedWeight
    dtype: torch.dtype
    bias: torch.Tensor | None
    gate: Gate | None

    @property
    def in_features(self) -> int:
        return self.weight.codes.shape[1]

    @property
    def out_features(self) -> int:
        outputs = self.weight.codes.shape[0]
        return outputs // 2 if self.gate else outputs

    def __call__(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        assert x.dtype is self.dtype, (x.dtype, self.dtype)
        assert not (wide and self.gate), ops.GATED_IS_NOT_WIDE
        outputs = len(self.weight.codes)
        size = max(1, WIDENED // max(1, self.in_features))
        out = x.new_empty((x.shape[0], outputs), dtype=torch.float32 if wide else x.dtype)
        for start in range(0, outputs, size):
            some = slice(start, start + size)
            bias = None if self.bias is None else self.bias[some]
            out[:, some] = _multiply(x, self.weight.rows(some), bias)
        return _gated(out, self.gate) if self.gate else out


def _gated(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """On a GPU by the best that there is; on a CPU this is the oracle."""
    return gate_mul(x, gate) if x.is_cpu else ops.gate_mul(x, gate)


def _multiply(x: torch.Tensor, weight: ops.CodedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, GroupedWeight):
        return functional.linear(x, weight.widened().to(x.dtype), bias)
    sums = functional.linear(x.float(), weight.codes.float()).mul_(weight.scales)
    return sums if bias is None else sums.add_(bias)


def pack_coded_linear(
    weight: ops.CodedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None, gate: Gate | None = None
) -> TorchCodedLinear:
    return TorchCodedLinear(weight, dtype, bias, gate)
