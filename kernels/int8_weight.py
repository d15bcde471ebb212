"""Weights of linear layers in int8: symmetric, one scale for each output.

Integers up to 127 are exact in every format that is multiplied here. So a layer sums products with whole numbers, as it
would with any weight, and multiplies each sum by its output's scale: rounding of the weight is all that is lost.
"""

from dataclasses import dataclass

import torch

LARGEST = 127
"""Of a code: -128 is not used, so that signs are alike."""
_NUMBERS = 2**22
"""Of a weight that are widened to fp32 at a time."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """weight[n] is about codes[n] x scales[n]."""

    codes: torch.Tensor
    """int8 [N, K]"""
    scales: torch.Tensor
    """fp32 [N]"""

    def __post_init__(self) -> None:
        assert self.codes.dim() == 2 and self.codes.dtype is torch.int8, (self.codes.shape, self.codes.dtype)
        assert self.scales.shape == self.codes.shape[:1] and self.scales.dtype is torch.float32, self.scales.shape

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> "Int8Weight":
        """Contents undefined; `fill` gives them."""
        codes = torch.empty((outputs, inputs), dtype=torch.int8, device=device)
        return cls(codes, torch.empty(outputs, device=device))

    def rows(self, some: slice) -> "Int8Weight":
        """Of some outputs."""
        return Int8Weight(self.codes[some], self.scales[some])

    def fill(self, rows: slice, weight: torch.Tensor) -> None:
        """Quantises `weight` (any float dtype, any device) into these rows, a part at a time.

        The largest number of a row becomes 127 or -127, others the nearest code. A row with a number that is not finite
        gets a scale that is not, so that what it gives is not either.
        """
        size = max(1, _NUMBERS // max(1, weight.shape[1]))
        codes, scales = self.codes[rows], self.scales[rows]
        for start in range(0, len(weight), size):
            part = weight[start : start + size].to(codes.device).float()
            scale = part.abs().amax(dim=1) / LARGEST
            divisor = torch.where(scale > 0, scale, 1).unsqueeze(1)  # a row may be all zeros
            codes[start : start + size] = (part / divisor).round_().clamp_(-LARGEST, LARGEST)
            scales[start : start + size] = scale
