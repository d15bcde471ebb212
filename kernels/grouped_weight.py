"""Weights of linear layers in codes of 4 or 8 bits, with a scale for each group of neighbouring inputs.

It is how GGUF files store them. A number is scale x code + minimum in fp32, rounded once to the format that is
multiplied in: a layer gives the bits that it gives with the weight unpacked. (The product has at most 24 bits in every
format of GGUF, so that it does not matter whether it is rounded before the sum.)
"""

from dataclasses import dataclass

import torch

INPUTS = 32
"""Their number is a multiple of it, as in every format of GGUF that has codes."""
CODES = {4: (0, -8), 8: (0,)}
"""Bits -> what codes may begin at: 4 bits hold 16 numbers from there on, 8 bits -128 to 127."""


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """weight[n, g, i] is codes[n, g, i] x scales[n, g] + minimums[n, g], i counting the inputs of a group."""

    codes: torch.Tensor
    """int8 [N, K]"""
    scales: torch.Tensor
    """fp16 or fp32 [N, groups]"""
    minimums: torch.Tensor | None
    """Like scales; None: zeros."""
    bits: int
    """In which a code is kept once it is packed."""
    lowest: int = 0
    """See `CODES`."""

    def __post_init__(self) -> None:
        (outputs, inputs), groups = self.codes.shape, self.scales.shape[1]
        assert self.codes.dtype is torch.int8 and inputs % INPUTS == 0, (self.codes.dtype, inputs)
        assert self.scales.shape[0] == outputs and inputs % groups == 0, (self.codes.shape, self.scales.shape)
        assert self.scales.dtype in (torch.float16, torch.float32), self.scales.dtype
        for other in () if self.minimums is None else (self.minimums,):
            assert other.shape == self.scales.shape and other.dtype is self.scales.dtype, (other.shape, other.dtype)
        assert self.minimums is None or self.lowest == 0, self.lowest
        assert self.group % 16 == 0 and self.lowest in CODES[self.bits], (self.group, self.bits, self.lowest)

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def rows(self, some: slice | torch.Tensor) -> "GroupedWeight":
        """Of some outputs."""
        minimums = None if self.minimums is None else self.minimums[some]
        return GroupedWeight(self.codes[some], self.scales[some], minimums, self.bits, self.lowest)

    def is_like(self, other: "GroupedWeight") -> bool:
        """Of the same size and form, and on the same device."""
        return self._kind == other._kind

    @property
    def _kind(self) -> tuple[object, ...]:
        numbers = self.codes.shape, self.codes.device, self.scales.shape, self.scales.dtype
        return *numbers, self.minimums is None, self.bits, self.lowest

    def fill(self, some: slice, weight: "GroupedWeight") -> None:
        """Copies `weight` into these outputs. It may have larger groups, narrower scales and no minimums."""
        self.codes[some] = weight.codes
        self.scales[some] = weight.scales.repeat_interleave(weight.group // self.group, dim=1)
        if self.minimums is None:
            assert weight.minimums is None
        elif weight.minimums is None:
            self.minimums[some] = 0
        else:
            self.minimums[some] = weight.minimums.repeat_interleave(weight.group // self.group, dim=1)

    def widened(self) -> torch.Tensor:
        """fp32 [N, K]"""
        numbers = self.codes.reshape(*self.scales.shape, self.group) * self.scales.float().unsqueeze(2)
        if self.minimums is not None:
            numbers += self.minimums.float().unsqueeze(2)
        return numbers.flatten(1)
