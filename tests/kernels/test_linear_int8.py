"""Linear layers with int8 weights: rounded as said, right, and the same bits for a row whatever surrounds it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import GATES, SHAPES, VARIANTS, assert_close, packer

from kernels import ops
from kernels.cpu import library
from kernels.cpu.linear import ISAS, NativeCodePacker, NativePacker
from kernels.exactness import probe
from kernels.int8_weight import LARGEST, Int8Weight
from kernels.reference import linear as reference
from kernels.registry import choose
from kernels.threads import set_threads

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("threads")
"""Which puts their number back."""


def quantised(weight: torch.Tensor) -> Int8Weight:
    made = Int8Weight.empty(*weight.shape, CPU)
    made.fill(slice(0, len(weight)), weight)
    return made


def tensors(k: int, n: int, dtype: torch.dtype, rows: int = 300) -> tuple[torch.Tensor, Int8Weight, torch.Tensor]:
    """x whose rows are further apart than they are long, weight, bias."""
    generator = torch.Generator().manual_seed(k * n)
    x = torch.randn(rows, k + 7, generator=generator).to(dtype)[:, :k]
    weight = quantised(torch.randn(n, k, generator=generator) * k**-0.5)
    return x, weight, torch.randn(n, generator=generator).to(dtype)


def numbers(weight: Int8Weight) -> torch.Tensor:
    """fp64 [N, K]"""
    return weight.codes.double() * weight.scales.double().unsqueeze(1)


# ------------------------------------------------------------------ the weight
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_the_nearest_and_the_largest_is_127(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = quantised(weight)
    largest = weight.float().abs().amax(dim=1)
    assert torch.equal(made.scales, largest / LARGEST)
    assert (made.codes.abs().amax(dim=1) == LARGEST).all() and made.codes.min() >= -LARGEST
    error = (made.codes * made.scales.unsqueeze(1) - weight.float()).abs()
    assert (error <= 0.5001 * made.scales.unsqueeze(1)).all()
    assert error.max() > 0.4 * made.scales.min(), "the bound is met"


def test_a_row_does_not_depend_on_the_part_that_it_came_in() -> None:
    """More numbers than are widened at a time, and row by row."""
    weight = torch.randn(2100, 2048, generator=torch.Generator().manual_seed(0))
    whole, parts = quantised(weight), Int8Weight.empty(2100, 2048, CPU)
    for start, end in ((0, 1), (1, 2), (2, 700), (700, 2100)):
        parts.fill(slice(start, end), weight[start:end])
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)
    assert torch.equal(whole.codes[-1], quantised(weight[-1:]).codes[0])


def test_zeros_are_zeros_and_damage_shows() -> None:
    weight = torch.randn(4, 8)
    weight[0], weight[1, 3], weight[2, 3] = 0, torch.nan, torch.inf
    for small in (1e-38, 1e-44):  # the scale has few bits, or none
        assert quantised(torch.full((1, 8), small)).codes.float().isfinite().all()
    out = ops.linear(torch.ones(2, 8), ops.pack_coded_linear(quantised(weight), torch.float32))
    assert (out[:, 0] == 0).all() and out[:, 3].isfinite().all() and not out[:, 1:3].isfinite().any()


# ------------------------------------------------------------------ products
@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_right(dtype: torch.dtype, isa: str, k: int, n: int, with_bias: bool) -> None:
    x, weight, bias = tensors(k, n, dtype)
    some_bias = bias if with_bias else None
    packed = packer(NativeCodePacker, dtype, isa)(weight, dtype, some_bias)
    assert (packed.in_features, packed.out_features) == (k, n)
    for rows in (1, 9, 300):
        out = ops.linear(x[:rows], packed)
        assert out.dtype is dtype and out.shape == (rows, n)
        assert_close(out, x[:rows], numbers(weight), some_bias)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize(("k", "n"), [(576, 300), (65, 200)])
def test_sums_are_those_of_a_weight_of_whole_numbers(dtype: torch.dtype, isa: str, k: int, n: int) -> None:
    """With scales of 1, bit for bit those of the plain kernel, whose order is tested in test_linear.py."""
    x, weight, bias = tensors(k, n, dtype)
    pack_int8, pack = (packer(kind, dtype, isa) for kind in (NativeCodePacker, NativePacker))
    ones = Int8Weight(weight.codes, torch.ones(n))
    int8, plain = pack_int8(ones, dtype, bias), pack(weight.codes.to(dtype), bias)
    for rows in (1, 2, 7, 16, 17, 40, 300):
        assert torch.equal(int8(x[:rows]), plain(x[:rows])), rows


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize(("k", "n"), [(576, 300), (65, 200)])
def test_rows_are_the_same_bits_in_any_company(dtype: torch.dtype, isa: str, k: int, n: int) -> None:
    x, weight, bias = tensors(k, n, dtype, rows=600)
    packed = packer(NativeCodePacker, dtype, isa)(weight, dtype, bias)
    together = packed(x)
    for threads, counts in (
        (1, (*range(1, 35), 63, 64, 65, 128, 129, 257, 512, 599)),
        (2, (1, 7, 33, 70, 300)),
        (3, (1, 40)),
    ):
        set_threads(threads)
        for rows in counts:
            start = rows * 37 % (601 - rows)
            assert torch.equal(packed(x[start : start + rows]), together[start : start + rows]), (threads, rows)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("n", [48, 50, 5, 1])
@pytest.mark.parametrize("gate", GATES)
def test_gated_is_linear_and_gate_mul(dtype: torch.dtype, isa: str, n: int, gate: ops.Gate) -> None:
    x, weight, bias = tensors(96, 2 * n, dtype, 70)
    pack = packer(NativeCodePacker, dtype, isa)
    tolerance = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
    for some_bias in (None, bias):
        gated, plain = pack(weight, dtype, some_bias, gate), pack(weight, dtype, some_bias)
        assert (gated.in_features, gated.out_features) == (96, n)
        expected = ops.gate_mul(plain(x), gate)
        for rows in (1, 15, 16, 17, 33, 70):
            torch.testing.assert_close(gated(x[:rows]), expected[:rows], atol=tolerance, rtol=tolerance)
            assert torch.equal(gated(x[:rows]), gated(x)[:rows]), rows


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 30])
def test_padding_is_never_multiplied(dtype: torch.dtype, isa: str, rows: int) -> None:
    """Beside and below the rows lies NaN, which times a zero of the padded weight would be NaN."""
    buffer = torch.full((40, 50), torch.nan, dtype=dtype)
    x = buffer[5 : 5 + rows, 3:36]
    x.copy_(torch.randn(rows, 33))
    packed = packer(NativeCodePacker, dtype, isa)(quantised(torch.randn(9, 33)), dtype)
    assert packed(x).isfinite().all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(1, 100), st.integers(0, 70), st.booleans(), st.sampled_from(list(ISAS)))
def test_any_shape(k: int, n: int, rows: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(k, n, dtype, rows)
    some_bias = bias if with_bias else None
    assert_close(ops.linear(x, ops.pack_coded_linear(weight, dtype, some_bias)), x, numbers(weight), some_bias)


@pytest.mark.parametrize("dtype", list(ISAS))
@pytest.mark.parametrize("gate", [None, *GATES])
def test_the_reference_computes_the_same(
    dtype: torch.dtype, gate: ops.Gate | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some outputs at a time, the last ones fewer."""
    monkeypatch.setattr(reference, "WIDENED", 300 * 33)
    x, weight, bias = tensors(300, 128, dtype, 5)
    found = reference.pack_coded_linear(weight, dtype, bias, gate)
    assert (found.in_features, found.out_features) == (300, 64 if gate else 128)
    if gate is None:
        assert_close(found(x), x, numbers(weight), bias)
    expected = ops.pack_coded_linear(weight, dtype, bias, gate)(x)
    tolerance = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(ISAS))
def test_the_check_at_start_up_takes_it(dtype: torch.dtype) -> None:
    packed = ops.pack_coded_linear(tensors(576, 960, dtype)[1], dtype)
    assert probe(packed, dtype) is None


# ------------------------------------------------------------------ contracts
def test_what_is_no_weight_in_int8_is_refused() -> None:
    weight = quantised(torch.ones(5, 8))
    with pytest.raises(AssertionError):
        Int8Weight(weight.codes.float(), weight.scales)
    with pytest.raises(AssertionError):
        Int8Weight(weight.codes, weight.scales[:4])
    with pytest.raises(AssertionError):
        ops.pack_coded_linear(weight, torch.float32, gate="silu")
    with pytest.raises(AssertionError):
        ops.pack_coded_linear(weight, torch.bfloat16, bias=torch.ones(5))
    packed = ops.pack_coded_linear(weight, torch.bfloat16)
    with pytest.raises(AssertionError):
        ops.linear(torch.ones(3, 8), packed)
    assert packed(torch.empty(0, 8, dtype=torch.bfloat16)).shape == (0, 5)


def test_it_is_not_left_to_torch_where_the_library_is_there() -> None:
    if library.load() is None:
        pytest.skip("no native library")
    for dtype in ISAS:
        assert choose("pack_coded_linear", "cpu", dtype).name == choose("pack_linear", "cpu", dtype).name
