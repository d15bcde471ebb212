"""Root mean square layer norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch

from configs.decoder import DecoderConfig
from engine.model.base import Loadable
from kernels import ops


class RMSNorm(Loadable):
    """x / rms(x) * weight: fp32 inside, rounded to the dtype before the weight is applied.

    Zero-centred (Gemma): the checkpoint stores the weight less 1; it is kept and applied in fp32, then rounded.
    """

    weight: torch.Tensor

    def __init__(self, config: DecoderConfig, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self.zero_centred = config.rms_norm_eps, config.zero_centred_norms
        self.register_buffer("weight", torch.empty(size, dtype=torch.float32 if self.zero_centred else dtype))

    def part_shapes(self, shard: str) -> dict[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load_part(self, shard: str, part: str, tensor: torch.Tensor) -> None:
        self.weight.copy_(tensor)
        if self.zero_centred:
            self.weight += 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, size] or [T, heads, size] -> the same shape"""
        return ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual; the sum stays in `residual`, in place. Both [T, size]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
