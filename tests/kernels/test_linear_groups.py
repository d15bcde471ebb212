"""Linear layers with weights in groups, as GGUF files store them: the bits of the same weight unpacked."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import GATES, VARIANTS, packer

from kernels import ops
from kernels.cpu.linear import ISAS, NativeCodePacker, NativePacker
from kernels.exactness import probe
from kernels.grouped_weight import GroupedWeight
from kernels.reference import linear as reference
from kernels.threads import set_threads

HALF, SINGLE = torch.float16, torch.float32
FORMS = {
    "Q4_0": (4, -8, 32, HALF, False),
    "Q4_1": (4, 0, 32, HALF, True),
    "Q4_K": (4, 0, 32, SINGLE, True),
    "Q8_0": (8, 0, 32, HALF, False),
    "Q5_1": (8, 0, 32, HALF, True),
    "Q6_K": (8, 0, 16, SINGLE, False),
    "Q4_K and Q6_K": (8, 0, 16, SINGLE, True),
}
"""Bits, lowest code, inputs of a group, numbers of scales, minimums: one for each path that the kernels take."""


pytestmark = pytest.mark.usefixtures("threads")
"""Which puts their number back."""


def random_weight(form: str, k: int, n: int) -> GroupedWeight:
    """Every code that the format has; scales have as many bits as it can give them, and both signs."""
    bits, lowest, group, kind, with_minimums = FORMS[form]
    generator = torch.Generator().manual_seed(k * n)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator) + (lowest if bits == 4 else -128)
    codes = codes.clamp(-32, 31) if "Q6_K" in form else codes
    scales = torch.randn(n, k // group, generator=generator).half() * k**-0.5
    minimums = torch.randn(n, k // group, generator=generator).half()
    if kind is SINGLE:  # products with whole numbers of 6 bits in Q4_K, of 8 with a sign in Q6_K
        low, high = (-128, 128) if bits == 8 else (0, 64)
        factors = torch.randint(low, high, (2, *scales.shape), generator=generator)
        scales, minimums = scales.float() * factors[0], minimums.float() * factors[1]
    return GroupedWeight(codes.to(torch.int8), scales, minimums if with_minimums else None, bits, lowest)


def tensors(k: int, n: int, dtype: torch.dtype, rows: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """x whose rows are further apart than they are long, bias."""
    generator = torch.Generator().manual_seed(k + n)
    x = torch.randn(rows, k + 7, generator=generator).to(dtype)[:, :k]
    return x, torch.randn(n, generator=generator).to(dtype)


# ------------------------------------------------------------------ the bits of the unpacked weight
@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("k", "n"), [(576, 300), (32, 31)])
def test_the_bits_of_the_unpacked_weight(dtype: torch.dtype, isa: str, form: str, k: int, n: int) -> None:
    """What those are is tested in test_linear.py. Few rows, many, more than one panel, and threads."""
    x, bias = tensors(k, n, dtype)
    weight, (pack_codes, pack) = (
        random_weight(form, k, n),
        (packer(kind, dtype, isa) for kind in (NativeCodePacker, NativePacker)),
    )
    coded, plain = pack_codes(weight, dtype, bias), pack(weight.widened().to(dtype), bias)
    assert (coded.in_features, coded.out_features) == (k, n)
    for rows in (1, 2, 7, 12, 16, 17, 40, 300):
        assert torch.equal(coded(x[:rows]), plain(x[:rows])), rows
    set_threads(3)
    for rows in (1, 40):
        assert torch.equal(coded(x[:rows]), plain(x[:rows])), rows


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [48, 5])
def test_gated(dtype: torch.dtype, isa: str, form: str, n: int) -> None:
    """Blocks in which gates and others have columns to fill them."""
    x, bias = tensors(96, 2 * n, dtype, 40)
    weight, (pack_codes, pack) = (
        random_weight(form, 96, 2 * n),
        (packer(kind, dtype, isa) for kind in (NativeCodePacker, NativePacker)),
    )
    for gate in GATES:
        coded, plain = pack_codes(weight, dtype, bias, gate), pack(weight.widened().to(dtype), bias, gate)
        assert (coded.in_features, coded.out_features) == (96, n)
        for rows in (1, 33):
            assert torch.equal(coded(x[:rows]), plain(x[:rows])), (gate, rows)


@pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)
@pytest.mark.parametrize("form", ["Q4_1", "Q6_K"])
def test_rows_are_the_same_bits_in_any_company(dtype: torch.dtype, isa: str, form: str) -> None:
    x, bias = tensors(576, 200, dtype, 600)
    packed = packer(NativeCodePacker, dtype, isa)(random_weight(form, 576, 200), dtype, bias)
    together = packed(x)
    for threads, counts in ((1, (*range(1, 35, 3), 63, 65, 129, 257, 512, 599)), (2, (1, 7, 33, 300))):
        set_threads(threads)
        for rows in counts:
            start = rows * 37 % (601 - rows)
            assert torch.equal(packed(x[start : start + rows]), together[start : start + rows]), (threads, rows)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 100), st.integers(0, 70), st.sampled_from(list(FORMS)))
def test_any_shape(blocks: int, n: int, rows: int, form: str) -> None:
    for dtype in ISAS:
        x, bias = tensors(32 * blocks, n, dtype, rows)
        weight = random_weight(form, 32 * blocks, n)
        found, plain = ops.pack_coded_linear(weight, dtype, bias), ops.pack_linear(weight.widened().to(dtype), bias)
        assert torch.equal(found(x), plain(x))


def test_damage_shows() -> None:
    weight = random_weight("Q4_1", 64, 3)
    weight.scales[1, 0] = torch.nan
    assert weight.minimums is not None
    weight.minimums[2, 1] = torch.inf
    for dtype in ISAS:
        out = ops.linear(torch.ones(2, 64, dtype=dtype), ops.pack_coded_linear(weight, dtype))
        assert out[:, 0].isfinite().all() and not out[:, 1:].isfinite().any()


@pytest.mark.parametrize("dtype", list(ISAS))
@pytest.mark.parametrize("gate", [None, *GATES])
def test_the_reference_computes_the_same(
    dtype: torch.dtype, gate: ops.Gate | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some outputs at a time, the last ones fewer."""
    monkeypatch.setattr(reference, "WIDENED", 288 * 33)
    x, bias = tensors(288, 128, dtype, 5)
    weight = random_weight("Q4_K", 288, 128)
    found = reference.pack_coded_linear(weight, dtype, bias, gate)
    assert (found.in_features, found.out_features) == (288, 64 if gate else 128)
    expected = reference.pack_linear(weight.widened().to(dtype), bias, gate)(x)
    tolerance = 2.0**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(ISAS))
def test_the_check_at_start_up_takes_it(dtype: torch.dtype) -> None:
    assert probe(ops.pack_coded_linear(random_weight("Q4_1", 576, 960), dtype), dtype) is None


# ------------------------------------------------------------------ contracts
def test_rows_of_a_weight() -> None:
    weight = random_weight("Q4_1", 64, 9)
    assert torch.equal(weight.rows(slice(2, 5)).widened(), weight.widened()[2:5])
    assert torch.equal(weight.rows(torch.tensor([7, 0])).widened(), weight.widened()[[7, 0]])


def test_what_is_no_weight_in_groups_is_refused() -> None:
    weight = random_weight("Q4_1", 64, 6)
    wrong = (
        {"codes": weight.codes.float()},
        {"codes": weight.codes[:, :48]},
        {"scales": weight.scales[:5]},
        {"scales": weight.scales.bfloat16()},
        {"scales": weight.scales.repeat(1, 4), "minimums": None},
        {"minimums": weight.scales.float()},
        {"lowest": -8},  # beside minimums
        {"minimums": None, "lowest": -1},
        {"minimums": None, "bits": 8, "lowest": -8},
    )
    for fields in wrong:
        with pytest.raises((AssertionError, KeyError)):
            dataclasses.replace(weight, **fields)  # type: ignore[arg-type]
