"""Root mean square layer norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch

from engine.model.base import Loadable
from kernels import ops


class RMSNorm(Loadable):
    """x / rms(x) * weight: fp32 inside, rounded to the dtype before the weight is applied."""

    weight: torch.Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(size, dtype=dtype))

    def part_shapes(self, shard: str) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load_part(self, shard: str, part: str, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size] -> [T, size]"""
        return ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual; the sum stays in `residual`, in place. Both [T, size]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
