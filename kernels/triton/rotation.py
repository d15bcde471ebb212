"""The rotation of formats with scales of their own, for queries and outputs of attention: bits of `kernels.reference.
kv_formats`. As matrix products it would cost attention more than a pass over rows that are few beside their past."""

import math

import torch
import triton
import triton.language as tl

from kernels.reference import kv_formats
from kernels.triton.codes import bits_of, narrowed, of_bits, widened

NUMBERS = 2048
"""Of a program's tile."""


@triton.jit
def butterflies(x: tl.tensor, LINES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr) -> tl.tensor:
    """fp32 [LINES, WIDTH]: sums and differences of numbers 1, 2, 4 ... apart, in blocks of 2 to the power of STAGES."""
    second = tl.arange(0, 2)[None, :, None] == 1
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(bits_of(x), ((LINES * WIDTH) >> (stage + 1), 2, 1 << stage))
        own, other = of_bits(pairs), of_bits(tl.sum(pairs, 1, keep_dims=True) - pairs)  # exact, as whole numbers
        x = tl.reshape(tl.where(second, other - own, own + other), (LINES, WIDTH))
    return x


@triton.jit(do_not_specialize=["lines"])
def _turn(
    x: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    signs: tl.tensor,
    out: tl.tensor,
    lines: tl.tensor,
    norm: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIMS: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    """LINES heads of rows x [rows, HEADS, DIMS]."""
    line, dim = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH)
    head = line % HEADS
    keep = (line < lines)[:, None] & (dim < DIMS)[None, :]
    at = x + (line // HEADS).to(tl.int64) * stride + head * DIMS
    y = widened(tl.load(at[:, None] + dim[None, :], mask=keep, other=0.0))
    sign = tl.load(signs + dim, mask=dim < DIMS, other=0.0)[None, :]
    if channels is not None:
        at = channels + head // GROUP * DIMS
        y = y * tl.load(at[:, None] + dim[None, :], mask=keep, other=0.0)
    if BACK:
        y = butterflies(y, LINES, WIDTH, STAGES) * norm * sign
    else:
        y = butterflies(y * sign, LINES, WIDTH, STAGES) * norm
    to = out + line.to(tl.int64) * DIMS
    tl.store(to[:, None] + dim[None, :], narrowed(y, out.dtype.element_ty), mask=keep)


def rotated_queries(q: torch.Tensor, channels: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """q [T, Hq, D], times `channels` [Hkv, D], rotated as K was and rounded to `dtype`."""
    return _launch(q, channels, dtype, back=False)


def unrotated(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sums of V [T, Hq, D] as it is stored, rotated back and rounded to `dtype`."""
    return _launch(sums, None, dtype, back=True)


def _launch(x: torch.Tensor, channels: torch.Tensor | None, dtype: torch.dtype, back: bool) -> torch.Tensor:
    rows, heads, dims = x.shape
    width, block = triton.next_power_of_2(dims), dims & -dims
    lines, tile = rows * heads, max(1, NUMBERS // width)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _turn[(triton.cdiv(lines, tile),)](
        x, x.stride(0), channels, kv_formats.signs(dims, x.device), out, lines, 1 / math.sqrt(block),
        heads, 1 if channels is None else heads // channels.shape[0], dims, tile, width, block.bit_length() - 1, back,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
