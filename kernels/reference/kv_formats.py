"""How a head's numbers become codes and scales, and what those mean when they are read.

    x        K or V of a token and head, widened to fp32
    fitted   (K of formats with scales of their own) (x - centre) / channel (`KVTransform`); Q is multiplied by the
             channels
    rotated  (formats with scales of their own) x times signs, then a fast Walsh-Hadamard transform over blocks as
             long as the largest power of two that divides head_dim: butterflies of stride 1, 2, 4 ..., then one product
             with 1 / sqrt(block). Q is rotated as K was, which leaves scores what they are; the output is rotated back.
             (QuIP, Chee et al. 2023; QuaRot, Ashkboos et al. 2024.)
    static   (e4m3 and int8 of a layer with static scales) x / channel; K's channels are multiplied into Q, V's into the
             output
    e4m3     scale = amax / 448, code = x / scale;  static: code = x           rounded to the nearest, saturating
    e5m2     code = x                                                         rounded to the nearest, saturating
    int8     scale = amax / 127, code = x / scale in -127 ... 127;  static: scale 1
    int4     of each 32 dims: zero = least, scale = (most - least) / 15, code = (x - zero) / scale in 0 ... 15
    feedback dim by dim: x of all later dims -= error x feedback, where error = x - what the code reads as, no more than
             `MOST_ERROR` scales. So later dims make up, as far as queries are concerned, for what earlier ones lost.
             (GPTQ, Frantar et al. 2023; LDLQ in QuIP: what they do to weights, done to keys.)

A scale is rounded to fp16 before anything is divided by it, and never less than `LEAST_SCALE`. Ties are rounded to even
codes. What has a scale and is not finite is stored as zeros whose scale is NaN: it reads as NaN, and its neighbours do
not notice. In static int8, which has no room for that, NaN is stored as 0. All arithmetic is fp32, one operation after
the other: `csrc/kv_encode.h` gives the same bits.

A number reads as its code, in int4 as code x scale + zero. The other scales are left to attention: that of K belongs to
its token's score, that of V to its token's weight.
"""

import functools
import math
from dataclasses import dataclass

import torch

from configs.kv import INT4_GROUP, KVFormat, LayerKV
from kernels.ops import KVTransform

LARGEST = {KVFormat.FP8_E4M3: 448.0, KVFormat.FP8_E5M2: 57344.0, KVFormat.INT8: 127.0}
"""The largest code of symmetric formats."""
MOST_ERROR = {KVFormat.FP8_E4M3: 32.0, KVFormat.INT8: 1.0, KVFormat.INT4: 1.0}
"""Scales: the step between the largest codes. Rounding alone stays below; what the feedback has driven out of the
format's range is cut off here."""
LEAST_SCALE, MOST_SCALE = 2.0**-14, 65504.0
"""What fp16 holds without loss of digits."""
SEED = 0x0C7A40
"""Of the signs. Another one is another format."""


@dataclass(frozen=True)
class Encoded:
    """T tokens of K or V."""

    codes: torch.Tensor
    """[T, kv_heads, head_dim] in the format's dtype; int4: one in a byte"""
    scales: torch.Tensor | None = None
    """fp16 [T, kv_heads, groups]"""
    zeros: torch.Tensor | None = None
    """fp16 [T, kv_heads, groups]"""


def encode(x: torch.Tensor, kind: LayerKV, format: KVFormat, transform: KVTransform) -> Encoded:
    """x: [T, kv_heads, head_dim], K or V of a layer."""
    if not format.is_quantised:
        return Encoded(x.to(getattr(torch, format.dtype)))
    x = x.float()
    if transform.centre is not None:
        x = x - transform.centre
    if transform.channels is not None:
        x = x / transform.channels
    if not kind.num_scales(format):
        return Encoded(_nearest(x, format))
    x = _split(rotate(x), kind.head_dim // kind.num_scales(format))
    finite = x.isfinite().all(-1)
    x = x.where(finite.unsqueeze(-1), 0.0)
    if format is KVFormat.INT4:
        least, most = x.amin(-1), x.amax(-1)
        least = least + 0.0  # no -0: which of two zeros is least is not said
        zeros = least.clamp(-MOST_SCALE, MOST_SCALE).half()
        scales = _scale(most - least, 15.0)
    else:
        zeros, scales = None, _scale(x.abs().amax(-1), LARGEST[format])
    grid = Grid(format, scales.float(), torch.zeros_like(x[..., 0]) if zeros is None else zeros.float())
    codes = grid.nearest(x) if transform.feedback is None else _fed_back(x, finite, grid, transform.feedback)
    return Encoded(codes.flatten(-2), scales.where(finite, math.nan), zeros)


@dataclass(frozen=True)
class Grid:
    """The numbers that groups of codes can stand for."""

    format: KVFormat
    scales: torch.Tensor
    """fp32 [..., groups]"""
    zeros: torch.Tensor
    """The same; 0 where the format has none."""

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., groups, numbers] -> codes, one in a byte."""
        x = (x - self.zeros.unsqueeze(-1)) / self.scales.unsqueeze(-1)
        return x.clamp(0, 15).round().to(torch.uint8) if self.format is KVFormat.INT4 else _nearest(x, self.format)

    def error(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        error = x - (codes.float() * self.scales.unsqueeze(-1) + self.zeros.unsqueeze(-1))
        most = self.scales.unsqueeze(-1) * MOST_ERROR[self.format]
        return torch.minimum(torch.maximum(error, -most), most)

    def group(self, number: int) -> "Grid":
        return Grid(self.format, self.scales[..., number, None], self.zeros[..., number, None])


def _fed_back(x: torch.Tensor, finite: torch.Tensor, grid: Grid, feedback: torch.Tensor) -> torch.Tensor:
    """x: [T, kv_heads, groups, numbers], finite: which groups are -> codes of its shape. A group that is not takes no
    part."""
    left, codes = x.flatten(-2).clone(), grid.nearest(torch.zeros_like(x))
    for dim in range(left.shape[-1]):
        group, place = divmod(dim, x.shape[-1])
        takes_part, its_grid = finite[..., group, None, None], grid.group(group)
        now = left[..., dim, None, None].where(takes_part, 0.0)
        found = its_grid.nearest(now)
        raw(codes)[..., group, place] = raw(found).where(takes_part, 0)[..., 0, 0]
        error = its_grid.error(now, found).where(takes_part, 0.0)[..., 0]
        left[..., dim + 1 :] -= error * feedback[:, dim, dim + 1 :]
    return codes


def raw(codes: torch.Tensor) -> torch.Tensor:
    """Bytes: torch neither indexes nor selects every dtype of one byte on every device."""
    return codes.view(torch.uint8) if codes.itemsize == 1 else codes


def _scale(span: torch.Tensor, steps: float) -> torch.Tensor:
    # Not by a scalar: on a GPU torch multiplies by the inverse of one.
    return (span / torch.full_like(span, steps)).clamp(LEAST_SCALE, MOST_SCALE).half()


def _nearest(x: torch.Tensor, format: KVFormat) -> torch.Tensor:
    most = LARGEST[format]
    if format is KVFormat.INT8:
        return x.nan_to_num(0.0, most, -most).clamp(-most, most).round().to(torch.int8)
    # torch's casts round to nearest, ties to even, and keep a NaN's sign
    return x.where(~x.isnan(), math.nan).clamp(-most, most).to(getattr(torch, format.dtype))


def decode_int4(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """codes: [..., D], one in a byte; scales, zeros: fp16 [..., groups] -> fp32 [..., D], rounded once."""
    codes = _split(codes, INT4_GROUP).float()
    return (codes * scales.float().unsqueeze(-1) + zeros.float().unsqueeze(-1)).flatten(-2)


def pack_k(codes: torch.Tensor) -> torch.Tensor:
    """int4 codes of K, one in a byte, [..., D] -> bytes [..., D / 2]: dim 2i low, dim 2i + 1 high."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_k(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_v(codes: torch.Tensor) -> torch.Tensor:
    """int4 codes of V, one in a byte, [..., D] -> bytes [..., D / 2]: of 32 dims, dim j low, dim j + 16 high."""
    low, high = _split(codes, INT4_GROUP).chunk(2, -1)
    return (low | high << 4).flatten(-2)


def unpack_v(packed: torch.Tensor) -> torch.Tensor:
    packed = _split(packed, INT4_GROUP // 2)
    return torch.cat((packed & 15, packed >> 4), -1).flatten(-2)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x: fp32 [..., head_dim]."""
    return _hadamard(x * signs(x.shape[-1], x.device))


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """What `rotate` did, undone."""
    return _hadamard(x) * signs(x.shape[-1], x.device)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    block = x.shape[-1] & -x.shape[-1]
    stride = 1
    while stride < block:
        a, b = _split(x, 2 * stride).chunk(2, -1)
        x = torch.cat((a + b, a - b), -1).flatten(-2)
        stride *= 2
    return x * (1 / math.sqrt(block))


def _split(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., D] -> [..., D / size, size]"""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


@functools.cache
def signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """fp32 [head_dim], 1 or -1: the same for K, V, Q and the output, in all layers. Kept: a GPU waits for a new one."""
    ones = [1.0 - 2.0 * (_mixed(SEED + dim) & 1) for dim in range(head_dim)]
    return torch.tensor(ones, dtype=torch.float32, device=device)


def _mixed(number: int) -> int:
    """32 bits, each of which depends on all of `number`'s (the finaliser of MurmurHash3, Appleby)."""
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16
