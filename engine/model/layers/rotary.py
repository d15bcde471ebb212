"""Rotary position encoding (Su et al. 2021, arXiv:2104.09864) and its scalings to longer windows.

Frequencies are fixed when the model is loaded, from the effective window. transformers' `dynamic` and `longrope` look
at the longest position of the batch instead, so that company would change an answer and cached keys would go stale.
"""

import math

import torch
from torch import nn

from configs.model_rope import RopeConfig
from engine.model.layers.norm import RMSNorm
from kernels import ops


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin, fp32 [window, rotary_dim / 2]: one row a position. The first `rotary_dim` dims of a head
    are rotated, the others pass."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, rope: RopeConfig, rotary_dim: int, max_position: int, window: int) -> None:
        super().__init__()
        device = torch.get_default_device()
        with torch.device("cpu"):  # the same bits wherever they are used
            frequencies = inverse_frequencies(rope, rotary_dim, max_position, window)
            angles = torch.arange(window, dtype=torch.float32)[:, None] * frequencies
            cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotates q [T, heads, head_dim] and k [T, kv_heads, head_dim] in place; positions: int64 [T]."""
        ops.rotary(q, k, positions, self.cos, self.sin)

    def after_norms(
        self, q: torch.Tensor, k: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm, positions: torch.Tensor
    ) -> None:
        """Norms each head, then rotates it, all in place."""
        weights = q_norm.weight, k_norm.weight
        ops.norm_rotary(q, k, *weights, q_norm.eps, positions, self.cos, self.sin)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, max_position: int, window: int) -> torch.Tensor:
    """fp32 [rotary_dim / 2]: radians a position for each pair of dims."""
    base = rope.theta
    if rope.kind == "dynamic":
        base = _dynamic_base(rope, rotary_dim, max_position, window)
    periods = base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "divisors":
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "longrope":
        divisors = rope.long_divisors if window > rope.original_max_position else rope.divisors
        return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * periods)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        ramp = _yarn_ramp(rope, rotary_dim)
        return 1.0 / (rope.factor * periods) * ramp + plain * (1.0 - ramp)
    return plain


def _dynamic_base(rope: RopeConfig, rotary_dim: int, max_position: int, window: int) -> float:
    """NTK-aware scaling: a base grown just enough for `window`; the plain base up to the window of training."""
    if window <= max_position:
        return rope.theta
    growth = rope.factor * window / max_position - (rope.factor - 1.0)
    return rope.theta * math.pow(growth, rotary_dim / (rotary_dim - 2))


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves divided by the factor, short ones kept, a smooth mix between (Meta's `apply_scaling`)."""
    wavelength = 2.0 * math.pi / plain
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    kept = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1.0 - kept) * plain / rope.factor + kept * plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, mixed)
    return torch.where(wavelength < shortest, plain, scaled)


def _yarn_ramp(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): 0 for fast dims, which stay, 1 for slow ones, which are divided."""

    def dimension_of(rotations: float) -> float:
        """The dim that turns `rotations` times within the window of training."""
        turns = rope.original_max_position / (rotations * 2.0 * math.pi)
        return rotary_dim * math.log(turns) / (2.0 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    return ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
