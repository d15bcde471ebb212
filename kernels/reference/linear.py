"""Linear layer in plain torch. Contract: `kernels.ops`."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.ops import Gate
from kernels.reference.elementwise import gate_mul


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
