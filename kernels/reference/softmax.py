"""Weights of a softmax over the vocabulary in plain torch. Contract: `kernels.ops`."""

import torch

from kernels.ops import LANES


def softmax_weights(
    x: torch.Tensor, temperature: torch.Tensor, shifted: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    torch.sub(x, x.amax(dim=1, keepdim=True), out=shifted)
    shifted.div_(temperature[:, None])
    torch.exp(shifted, out=weights)
    return group_sums(weights)


def group_sums(weights: torch.Tensor) -> torch.Tensor:
    """fp32 [R, LANES x G] -> [R, G], by halving. (Torch's own sums over a row may split it among threads.)"""
    sums, groups = weights, weights.shape[1] // LANES
    while sums.shape[1] > groups:
        first, second = sums.chunk(2, dim=1)
        sums = first + second
    return sums
