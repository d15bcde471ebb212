"""Linear layer in plain torch. Contract: `kernels.ops`."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.int8_weight import Int8Weight
from kernels.ops import Gate
from kernels.reference.elementwise import gate_mul

WIDENED = 2**24
"""Numbers of an int8 weight that are fp32 at a time."""


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.weight, self.bias)
        return gate_mul(out, self.gate) if self.gate else out


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate | None = None) -> TorchLinear:
    return TorchLinear(weight, bias, gate)


@dataclass(frozen=True)
class TorchInt8Linear:
    """Codes become fp32 as they are needed, some outputs at a time."""

    weight: Int8Weight
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self.dtype, (x.dtype, self.dtype)
        codes, numbers = self.weight.codes, x.float()
        size = max(1, WIDENED // max(1, self.in_features))
        out = x.new_empty((x.shape[0], codes.shape[0]))
        for start in range(0, codes.shape[0], size):
            some = slice(start, start + size)
            sums = functional.linear(numbers, codes[some].float()).mul_(self.weight.scales[some])
            out[:, some] = sums if self.bias is None else sums.add_(self.bias[some])
        return gate_mul(out, self.gate) if self.gate else out


def pack_linear_int8(
    weight: Int8Weight, dtype: torch.dtype, bias: torch.Tensor | None = None, gate: Gate | None = None
) -> TorchInt8Linear:
    return TorchInt8Linear(weight, dtype, bias, gate)
