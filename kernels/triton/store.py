"""Writing K and V into pages on a GPU. Contract: `kernels.ops.store_kv`; formulas: `kernels.reference.kv_formats`.

Codes and scales have the reference's bits: products are not fused with sums, and divisions round to the nearest.

A program stores one head's numbers of some neighbouring tokens, of K or of V. It reads runs of head_dim numbers; what
it writes lies side by side where the tokens do.
"""

import math

import torch
import triton
import triton.language as tl

from configs.kv import INT4_GROUP, KVHalf, KVOrder
from kernels.ops import LayerPages
from kernels.reference import kv_formats
from kernels.triton.codes import (
    INFINITE,
    MAGNITUDE,
    bits_of,
    e4m3_of,
    e5m2_of,
    float_of_e4m3,
    float_of_int8,
    int4_of,
    int8_of,
    narrowed,
    of_bits,
    widened,
)
from kernels.triton.device import DTYPES
from kernels.triton.rotation import butterflies

NUMBERS, FED_NUMBERS = 2048, 1024
"""Of a program's tile, padding included. The second: where keys are fed back, and each dim waits for those before."""
WARPS = 4

GROUP = tl.constexpr(INT4_GROUP)
LEAST_SCALE = tl.constexpr(kv_formats.LEAST_SCALE)
MOST_SCALE = tl.constexpr(kv_formats.MOST_SCALE)
NAN_SCALE = tl.constexpr(0x7E00)
"""Bits of fp16."""


def store_kv(k: torch.Tensor, v: torch.Tensor, pages: LayerPages, slot_mapping: torch.Tensor) -> None:
    """K and V in one launch, whatever their formats."""
    kind, spec = pages.kind, pages.spec
    assert spec.order is KVOrder.ROWS, spec.order
    tokens, heads, dims = k.shape
    k_half, v_half = pages.halves
    k_transform, v_transform = pages.transforms
    width, block = triton.next_power_of_2(dims), dims & -dims
    rows = max(1, (NUMBERS if k_transform.feedback is None else FED_NUMBERS) // width)
    is_rotated = any(kind.is_rotated(format) for format in kind.formats)
    # fmt: off
    _store[heads, triton.cdiv(tokens, rows), 2](
        k, v, slot_mapping, pages.pool, kv_formats.signs(dims, k.device) if is_rotated else None,
        k_transform.centre, k_transform.channels, k_transform.feedback, v_transform.channels,
        tokens, k.stride(0), v.stride(0), spec.block_bytes, *_offsets(k_half), *_offsets(v_half),
        k_half.format.value, _dtype(k_half), kind.num_scales(k_half.format),
        v_half.format.value, _dtype(v_half), kind.num_scales(v_half.format),
        spec.block_size, dims, rows, width, block.bit_length() - 1, 1 / math.sqrt(block),
        num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
    )
    # fmt: on


def _offsets(half: KVHalf) -> tuple[int, int, int]:
    """Bytes inside a block before codes, scales and zero points; 0 where there are none."""
    scales, zeros = (0 if part is None else part.offset for part in (half.scales, half.zeros))
    return half.codes.offset, scales, zeros


def _dtype(half: KVHalf) -> tl.dtype:
    """Of numbers that are stored as they are; of codes: uint8."""
    return tl.uint8 if half.format.is_quantised else DTYPES[getattr(torch, half.codes.dtype)]


@triton.jit(do_not_specialize=["tokens", "k_scales", "k_zeros", "v_scales", "v_zeros"])
def _store(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    pool: tl.tensor,
    signs: tl.tensor,
    centre: tl.tensor,
    k_channels: tl.tensor,
    feedback: tl.tensor,
    v_channels: tl.tensor,
    tokens: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_bytes: tl.tensor,
    k_codes: tl.tensor,
    k_scales: tl.tensor,
    k_zeros: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    v_zeros: tl.tensor,
    K_FORMAT: tl.constexpr,
    K_DTYPE: tl.constexpr,
    K_GROUPS: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_DTYPE: tl.constexpr,
    V_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """Grid: (heads, tiles of ROWS tokens, K or V). A tile's rows are WIDTH numbers, a power of two, of which the first
    DIMS count. DTYPE: of what is stored as it is, else uint8; GROUPS: scales of a head and token, 0: none.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < tokens, other=-1)
    row = row.to(tl.int64)  # slots are: what comes of them may be beyond 32 bits
    block = pool + slot // BLOCK_SIZE * block_bytes
    if tl.program_id(2) == 0:
        _store_half(
            k + row * k_stride, slot, block + k_codes, block + k_scales, block + k_zeros, signs, centre, k_channels,
            feedback, K_FORMAT, K_DTYPE, K_GROUPS, True, BLOCK_SIZE, DIMS, ROWS, WIDTH, STAGES, NORM,
        )  # fmt: skip
    else:
        _store_half(
            v + row * v_stride, slot, block + v_codes, block + v_scales, block + v_zeros, signs, None, v_channels,
            None, V_FORMAT, V_DTYPE, V_GROUPS, False, BLOCK_SIZE, DIMS, ROWS, WIDTH, STAGES, NORM,
        )  # fmt: skip


@triton.jit
def _store_half(
    x: tl.tensor,
    slot: tl.tensor,
    codes_at: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    signs: tl.tensor,
    centre: tl.tensor,
    channels: tl.tensor,
    feedback: tl.tensor,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """x, slot, ..._at: [ROWS], of each token its numbers, and where in the pool its codes, scales and zeros begin."""
    head, dim = tl.program_id(0), tl.arange(0, WIDTH)
    keep = (slot >= 0)[:, None] & (dim < DIMS)[None, :]
    numbers = tl.load(x[:, None] + (head * DIMS + dim)[None, :], mask=keep, other=0.0)
    line = head * BLOCK_SIZE + slot % BLOCK_SIZE
    if tl.uint8 == DTYPE:
        y = _fitted(widened(numbers), centre, channels, head, DIMS, WIDTH)
        if GROUPS > 0:
            y = _rotated(y, signs, DIMS, ROWS, WIDTH, STAGES, NORM)
            codes = _scaled(
                y, slot, scales_at, zeros_at, feedback, FORMAT, GROUPS, BLOCK_SIZE, DIMS, ROWS, WIDTH
            )  # fmt: skip
        else:
            codes = _nearest(y, FORMAT)
        if FORMAT == "int4":
            half = tl.arange(0, WIDTH // 2)
            keep = (slot >= 0)[:, None] & (half < DIMS // 2)[None, :]
            pairs = _paired(codes, IS_K, ROWS, WIDTH)
            tl.store((codes_at + line * (DIMS // 2))[:, None] + half[None, :], pairs, mask=keep)
        else:
            tl.store((codes_at + line * DIMS)[:, None] + dim[None, :], codes, mask=keep)
    else:
        if numbers.dtype != DTYPE:
            numbers = narrowed(widened(numbers), DTYPE)
        tl.store((codes_at.to(tl.pointer_type(DTYPE)) + line * DIMS)[:, None] + dim[None, :], numbers, mask=keep)


@triton.jit
def _fitted(
    x: tl.tensor,
    centre: tl.tensor,
    channels: tl.tensor,
    head: tl.tensor,
    DIMS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """x: [ROWS, WIDTH] -> (x - centre) / channel; None: 0 and 1. Beyond DIMS: 0."""
    dim = tl.arange(0, WIDTH)
    if centre is not None:
        x = x - tl.load(centre + head * DIMS + dim, mask=dim < DIMS, other=0.0)[None, :]
    if channels is not None:
        x = tl.div_rn(x, tl.load(channels + head * DIMS + dim, mask=dim < DIMS, other=1.0)[None, :])
    return x


@triton.jit
def _rotated(
    x: tl.tensor,
    signs: tl.tensor,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """x: [ROWS, WIDTH]."""
    dim = tl.arange(0, WIDTH)
    x = x * tl.load(signs + dim, mask=dim < DIMS, other=0.0)[None, :]
    return butterflies(x, ROWS, WIDTH, STAGES) * NORM


@triton.jit
def _scaled(
    x: tl.tensor,
    slot: tl.tensor,
    scales_at: tl.tensor,
    zeros_at: tl.tensor,
    feedback: tl.tensor,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """x: [ROWS, WIDTH] -> uint8 codes, one in a byte. Stores scales and zeros."""
    SIZE: tl.constexpr = GROUP if FORMAT == "int4" else WIDTH
    PARTS: tl.constexpr = WIDTH // SIZE  # those from GROUPS on are padding
    x = tl.reshape(x, (ROWS, PARTS, SIZE))
    largest = tl.max(bits_of(x) & MAGNITUDE, 2)
    finite = largest < INFINITE
    x = tl.where(finite[:, :, None], x, 0.0)
    part = tl.arange(0, PARTS)
    keep = (slot >= 0)[:, None] & (part < GROUPS)[None, :]
    line = (tl.program_id(0) * GROUPS + part)[None, :] * BLOCK_SIZE + (slot % BLOCK_SIZE)[:, None]
    if FORMAT == "int4":
        least = tl.min(x, 2) + 0.0  # no -0
        narrow = _scale(tl.max(x, 2) - least, 15.0)
        narrow_zero = tl.minimum(tl.maximum(least, -MOST_SCALE), MOST_SCALE).to(tl.float16)
        tl.store(zeros_at.to(tl.pointer_type(tl.float16))[:, None] + line, narrow_zero, mask=keep)
        zero = narrow_zero.to(tl.float32)
    else:
        narrow = _scale(of_bits(tl.where(finite, largest, 0)), 127.0 if FORMAT == "int8" else 448.0)
        zero = tl.zeros((ROWS, PARTS), tl.float32)
    stored = tl.where(finite, narrow.to(tl.int16, bitcast=True), NAN_SCALE).to(tl.int16)
    tl.store(scales_at.to(tl.pointer_type(tl.int16))[:, None] + line, stored, mask=keep)
    scale = narrow.to(tl.float32)
    if feedback is None:
        codes = _nearest(tl.div_rn(x - zero[:, :, None], scale[:, :, None]), FORMAT)
    else:
        codes = _fed_back(x, scale, zero, finite, feedback, FORMAT, GROUPS, DIMS, ROWS, WIDTH)
    return tl.reshape(codes, (ROWS, WIDTH))


@triton.jit
def _fed_back(
    x: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    finite: tl.tensor,
    feedback: tl.tensor,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """x: [ROWS, parts, numbers]; scale, zero, finite: [ROWS, parts] -> uint8 codes [ROWS, WIDTH]. Dim by dim: later
    dims are rid of this one's error times its share in them.

    What the next dim holds is picked before that, and its own share subtracted after, so that neither waits for the
    other; and shares are loaded a dim ahead. Dims that have their codes may become anything.
    """
    SIZE: tl.constexpr = DIMS // GROUPS
    MOST_ERROR: tl.constexpr = 32.0 if FORMAT == "fp8_e4m3" else 1.0
    dims = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (ROWS, WIDTH))
    parts = tl.arange(0, scale.shape[1])[None, :]
    shares = feedback + tl.program_id(0) * (DIMS * DIMS)
    left = tl.reshape(x, (ROWS, WIDTH))
    codes = tl.zeros((ROWS, WIDTH), tl.uint8)
    now = _picked(left, dims, 0)
    share = tl.load(shares + dims, mask=dims < DIMS, other=0.0)
    for group in range(GROUPS):
        step = tl.sum(tl.where(parts == group, scale, 0.0), 1)
        start = tl.sum(tl.where(parts == group, zero, 0.0), 1)
        takes_part = tl.sum(tl.where((parts == group) & finite, 1, 0), 1) > 0
        most = step * MOST_ERROR
        for dim in range(group * SIZE, group * SIZE + SIZE):
            following = dim + 1
            ahead = _picked(left, dims, following)
            row = shares + tl.minimum(following, DIMS - 1) * DIMS
            share_ahead = tl.load(row + dims, mask=dims < DIMS, other=0.0)
            one = tl.load(shares + dim * DIMS + following, mask=following < DIMS, other=0.0)
            now = tl.where(takes_part, now, 0.0)  # of which no error remains
            code = _nearest(tl.div_rn(now - start, step), FORMAT)
            codes = tl.where(dims == dim, code[:, None], codes)
            error = now - (_number(code, FORMAT) * step + start)
            error = tl.minimum(tl.maximum(error, -most), most)
            left = left - error[:, None] * share
            now = ahead - error * one
            share = share_ahead
    return codes


@triton.jit
def _picked(x: tl.tensor, dims: tl.tensor, dim: tl.tensor) -> tl.tensor:
    """x: fp32 [ROWS, WIDTH] -> x[:, dim]; 0 where there is none. As bits, so that -0 stays what it is."""
    return of_bits(tl.sum(tl.where(dims == dim, bits_of(x), 0), 1))


@triton.jit
def _scale(span: tl.tensor, STEPS: tl.constexpr) -> tl.tensor:
    """fp32 -> fp16"""
    return tl.minimum(tl.maximum(tl.div_rn(span, STEPS), LEAST_SCALE), MOST_SCALE).to(tl.float16)


@triton.jit
def _nearest(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """fp32 -> uint8"""
    if FORMAT == "int4":
        code = int4_of(x)
    elif FORMAT == "int8":
        code = int8_of(x)
    elif FORMAT == "fp8_e4m3":
        code = e4m3_of(x)
    else:
        code = e5m2_of(x)
    return code


@triton.jit
def _number(code: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """uint8 -> fp32: what a code reads as, before scale and zero."""
    if FORMAT == "int4":
        x = code.to(tl.float32)
    elif FORMAT == "int8":
        x = float_of_int8(code)
    else:
        x = float_of_e4m3(code)
    return x


@triton.jit
def _paired(codes: tl.tensor, IS_K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """uint8 [ROWS, WIDTH] of four bits -> two in a byte [ROWS, WIDTH / 2]: in K dims 2 i and 2 i + 1, in V, inside a
    group, dims j and j + 16."""
    shift = 4 * tl.arange(0, 2)
    wide = codes.to(tl.int32)
    if IS_K:
        pairs = tl.reshape(wide, (ROWS, WIDTH // 2, 2)) << shift[None, None, :]
    else:
        pairs = tl.reshape(wide, (ROWS, WIDTH // GROUP, 2, GROUP // 2)) << shift[None, None, :, None]
    return tl.reshape(tl.sum(pairs, 2), (ROWS, WIDTH // 2)).to(tl.uint8)
