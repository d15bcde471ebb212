"""Linear layer in plain torch. Contract: `kernels.ops`."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class TorchLinear:
    """The weight as it is; `torch.nn.functional.linear` multiplies."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> TorchLinear:
    return TorchLinear(weight, bias)
