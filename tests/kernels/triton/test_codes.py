"""Numbers of the KV formats inside Triton kernels: all codes, and every fp32 number near which a format rounds."""

import pytest
import torch
import triton
import triton.language as tl

from configs.kv import KVFormat, LayerKV
from kernels.ops import KVTransform
from kernels.reference import kv_formats
from kernels.triton import codes

ALL = 1 << 16
BYTES = torch.arange(256, dtype=torch.uint8)


@triton.jit
def _apply(x, out, FUNCTION: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + at, FUNCTION(tl.load(x + at)))


@triton.jit
def _to_bf16(x):
    return codes.narrowed(x, tl.bfloat16)


@triton.jit
def _to_fp16(x):
    return codes.narrowed(x, tl.float16)


def applied(function, x, dtype):
    out = torch.full_like(x, 77, dtype=dtype)
    count = min(ALL, len(x))
    _apply[len(x) // count,](x, out, function, count)
    return out


def bits(x):
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def assert_same(found, expected):
    """Bit for bit; which NaN it is, is the machine's affair."""
    assert found.dtype is expected.dtype
    nan = expected.isnan() if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
    different = (bits(found) != bits(expected)) & ~nan
    assert not different.any(), (different.nonzero(), found[different], expected[different])
    assert not nan.any() or found[nan].isnan().all()


def telling_floats():
    """All that a format of at most 16 bits can hold or be half way between, with fp32's exponents, and their
    neighbours."""
    upper = torch.arange(ALL, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])[:, None]
    return (upper | lower).flatten().to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_widened(dtype):
    x = torch.arange(ALL, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same(applied(codes.widened, x, torch.float32), x.float())


@pytest.mark.parametrize(("function", "dtype"), [(_to_bf16, torch.bfloat16), (_to_fp16, torch.float16)])
def test_fp32_is_narrowed_to_the_nearest(function, dtype):
    x = telling_floats()
    middles = torch.arange(ALL, dtype=torch.int32).to(torch.int16).view(dtype).float()
    middles = torch.stack([middles, bits(middles).add(1 << 12).view(torch.float32)]).flatten()  # of fp16
    for some in (x, middles):
        assert_same(applied(function, some, dtype), some.to(dtype))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (codes.float_of_e4m3, torch.float8_e4m3fn),
        (codes.float_of_e5m2, torch.float8_e5m2),
        (codes.float_of_int8, torch.int8),
    ],
)
@pytest.mark.parametrize("stored", [torch.uint8, torch.int8])
def test_every_code_reads_as_the_number_that_it_stands_for(function, dtype, stored):
    assert_same(applied(function, BYTES.view(stored), torch.float32), BYTES.view(dtype).float())


@pytest.mark.parametrize("stored", [torch.uint8, torch.int8])
def test_two_codes_of_four_bits_are_read_from_a_byte(stored):
    for function, expected in ((codes.low_int4, BYTES & 15), (codes.high_int4, BYTES >> 4)):
        assert_same(applied(function, BYTES.view(stored), torch.float32), expected.float())


@pytest.mark.parametrize(
    ("function", "format"),
    [
        (codes.e4m3_of, KVFormat.FP8_E4M3),
        (codes.e5m2_of, KVFormat.FP8_E5M2),
        (codes.int8_of, KVFormat.INT8),
    ],
)
def test_the_nearest_code_is_the_references(function, format):
    x = telling_floats()
    kind = LayerKV(1, len(x), format, static=format.may_be_static)
    ones = KVTransform(torch.ones(1, len(x)) if kind.static else None)
    expected = kv_formats.encode(x.view(1, 1, -1), kind, format, ones).codes.flatten()
    assert_same(applied(function, x, torch.uint8), expected.view(torch.uint8))


def test_the_nearest_code_of_four_bits_is_the_references():
    x = telling_floats().nan_to_num()
    one = torch.ones(())
    expected = kv_formats.Grid(KVFormat.INT4, one, 0 * one).nearest(x)
    assert_same(applied(codes.int4_of, x, torch.uint8), expected)
