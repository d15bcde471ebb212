"""Numbers of the KV formats from and to fp32, inside Triton kernels: the bits of `kernels.reference.kv_formats`.

By integer operations, on every device: not every GPU has casts of fp8, and those of Triton's interpreter truncate, lose
carries and do not saturate. Nothing here computes on bf16.
"""

import triton
import triton.language as tl


@triton.jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """fp32 -> int32"""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def of_bits(bits: tl.tensor) -> tl.tensor:
    """int32 -> fp32"""
    return bits.to(tl.float32, bitcast=True)


INTERPRETED = tl.constexpr(not isinstance(bits_of, triton.JITFunction))
"""Whether kernels run in Triton's interpreter: what TRITON_INTERPRET said when this module was imported."""

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
"""Bits of a float without its sign."""
INFINITE = tl.constexpr(0x7F800000)
"""Bits of infinity; larger magnitudes are NaN."""
ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to a small number it leaves the nearest whole number, ties to even, in the low bits."""
E4M3_TO_FLOAT = tl.constexpr(2.0**120)
"""By how much a float's exponent makes of the same bits less than e4m3's does."""


# ------------------------------------------------------------------ floats
@triton.jit
def widened(x: tl.tensor) -> tl.tensor:
    """fp32, fp16 or bf16 -> fp32"""
    if x.dtype == tl.bfloat16:
        wide = of_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def narrowed(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 -> fp32, fp16 or bf16: the nearest, ties to even. NaN stays NaN."""
    if INTERPRETED and DTYPE.is_bf16():
        bits = bits_of(x)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        narrow = tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(DTYPE)
    return narrow


# ------------------------------------------------------------------ what codes read as
@triton.jit
def float_of_e4m3(code: tl.tensor) -> tl.tensor:
    """uint8 or int8 -> fp32"""
    bits = code.to(tl.int32)
    magnitude = bits & 0x7F
    x = of_bits(magnitude << 20 | (bits & 0x80) << 24) * E4M3_TO_FLOAT
    return tl.where(magnitude == 0x7F, float("nan"), x)


@triton.jit
def float_of_e5m2(code: tl.tensor) -> tl.tensor:
    """uint8 or int8 -> fp32: codes are fp16 without its last byte."""
    return (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def float_of_int8(code: tl.tensor) -> tl.tensor:
    """uint8 or int8 -> fp32"""
    return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def low_int4(byte: tl.tensor) -> tl.tensor:
    """uint8 or int8 -> fp32: the first of its two codes, still without scale and zero."""
    return (byte.to(tl.int32) & 15).to(tl.float32)


@triton.jit
def high_int4(byte: tl.tensor) -> tl.tensor:
    """uint8 or int8 -> fp32: the second of its two codes, still without scale and zero."""
    return (byte.to(tl.int32) >> 4 & 15).to(tl.float32)


# ------------------------------------------------------------------ the nearest code
@triton.jit
def e4m3_of(x: tl.tensor) -> tl.tensor:
    """fp32 -> uint8: saturating, ties to even; NaN is 0x7f."""
    return _fp8_of(x, 4, 3, 0x43E00000, 16384.0)  # 448


@triton.jit
def e5m2_of(x: tl.tensor) -> tl.tensor:
    """fp32 -> uint8: saturating, ties to even; NaN is 0x7f."""
    return _fp8_of(x, 5, 2, 0x47600000, 128.0)  # 57344


@triton.jit
def int8_of(x: tl.tensor) -> tl.tensor:
    """fp32 -> uint8, two's complement of -127 ... 127: saturating, ties to even; NaN is 0."""
    return _byte(tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -127.0), 127.0))


@triton.jit
def int4_of(x: tl.tensor) -> tl.tensor:
    """fp32, no NaN -> uint8 of 0 ... 15: saturating, ties to even."""
    return _byte(tl.minimum(tl.maximum(x, 0.0), 15.0))


@triton.jit
def _byte(x: tl.tensor) -> tl.tensor:
    """fp32 in -128 ... 255 -> uint8: the nearest whole number, ties to even."""
    return (bits_of(x + ROUND) & 0xFF).to(tl.uint8)


@triton.jit
def _fp8_of(
    x: tl.tensor, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr, STEP: tl.constexpr
) -> tl.tensor:
    """fp32 -> uint8 of a format with so many bits. LARGEST: its largest number, as bits of a float; STEP: a float whose
    last digit is its smallest."""
    BIAS: tl.constexpr = 128 - (1 << (EXPONENT - 1))  # how much higher a float's exponent counts
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = bits_of(x)
    magnitude = tl.minimum(bits & MAGNITUDE, LARGEST)
    normal = (magnitude + ((1 << (SHIFT - 1)) - 1 - (BIAS << 23)) + (magnitude >> SHIFT & 1)) >> SHIFT
    small = bits_of(of_bits(magnitude) + STEP) - ((BIAS + SHIFT + 1) << 23)
    code = tl.where(magnitude < (BIAS + 1) << 23, small, normal) | (bits >> 24 & 0x80)
    return tl.where((bits & MAGNITUDE) > INFINITE, 0x7F, code).to(tl.uint8)
