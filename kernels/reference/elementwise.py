"""Norms, rotary embedding, gates and rows of tables in plain torch. Contracts: `kernels.ops`."""

import torch
from torch.nn import functional

from kernels.ops import Gate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual += x
    return rms_norm(residual, weight, eps)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for x in (q, k):
        turning = x[..., : 2 * cos.shape[1]]
        first, second = turning.float().chunk(2, dim=-1)
        turning.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))


def norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    q.copy_(rms_norm(q, q_weight, eps))
    k.copy_(rms_norm(k, k_weight, eps))
    rotary(q, k, positions, cos, sin)


def gate_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    gates, up = x.chunk(2, dim=-1)
    return (functional.silu(gates) if gate == "silu" else functional.gelu(gates, approximate="tanh")) * up


def gather_rows(table: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    rows = table[indices]
    return rows if scale == 1.0 else rows * scale
