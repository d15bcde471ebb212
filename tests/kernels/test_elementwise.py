"""Norms, rotary embedding and gates in C++ against plain torch, for every instruction set of this CPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops
from kernels.cpu import elementwise, library
from kernels.cpu.elementwise import ISAS
from kernels.cpu.library import ISA_TITLES
from kernels.reference import elementwise as reference
from kernels.registry import Accepted
from kernels.threads import num_threads, set_threads

VARIANTS = [(dtype, isa) for dtype in ISAS for isa in ISAS[dtype]]
WIDTHS = [576, 64, 7, 1, 33, 130]
each_variant = pytest.mark.parametrize(("dtype", "isa"), VARIANTS, ids=str)


def native(op: str, dtype: torch.dtype, isa: str) -> Callable[..., Any]:
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")
    [candidate] = [c for c in elementwise.CANDIDATES if c.op == op and c.name == f"C++ {ISA_TITLES[isa]}"]
    offer = candidate.offer("cpu", dtype)
    if not isinstance(offer, Accepted):
        pytest.skip(offer.reason)
    return offer.function


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance in units in the last place; zeros of both signs are equal."""
    bits = torch.int16 if a.dtype is torch.bfloat16 else torch.int32

    def line(x: torch.Tensor) -> torch.Tensor:
        whole = x.contiguous().view(bits).long()
        return torch.where(whole < 0, -(whole & (2 ** (8 * x.itemsize - 1) - 1)), whole)

    return int((line(a) - line(b)).abs().max())


def tight(dtype: torch.dtype, isa: str) -> int:
    """Allowed ulps: the order of additions and the exponential may differ from torch's.

    In bf16 a differing rounding in the middle is multiplied on. Without fused multiply-add exponents are coarser.
    """
    if dtype is torch.bfloat16:
        return 2
    return 64 if isa == "baseline" else 8


@each_variant
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(dtype: torch.dtype, isa: str, width: int) -> None:
    x, weight = normal(5, width + 3, dtype=dtype)[:, :width], normal(width, dtype=dtype, seed=1)
    out = native("rms_norm", dtype, isa)(x, weight, 1e-5)
    assert out.dtype is dtype
    assert ulps(out, reference.rms_norm(x, weight, 1e-5)) <= tight(dtype, isa)


@each_variant
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(dtype: torch.dtype, isa: str, width: int) -> None:
    x, residual = normal(5, width + 3, dtype=dtype)[:, :width], normal(5, width, dtype=dtype, seed=2)
    weight, expected = normal(width, dtype=dtype, seed=1), x + residual
    out = native("add_rms_norm", dtype, isa)(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert ulps(out, reference.rms_norm(expected, weight, 1e-5)) <= tight(dtype, isa)


@each_variant
def test_norm_of_zeros_and_of_large_numbers(dtype: torch.dtype, isa: str) -> None:
    norm, weight = native("rms_norm", dtype, isa), torch.ones(64, dtype=dtype)
    assert torch.equal(norm(torch.zeros(1, 64, dtype=dtype), weight, 1e-5), torch.zeros(1, 64, dtype=dtype))
    large = torch.full((1, 64), 1e10, dtype=dtype)
    torch.testing.assert_close(norm(large, weight, 1e-5), torch.ones(1, 64, dtype=dtype), rtol=1e-6, atol=0)


@each_variant
@pytest.mark.parametrize("dims", [64, 6, 34])
def test_rotary_turns_views_of_one_buffer_in_place(dtype: torch.dtype, isa: str, dims: int) -> None:
    tokens, heads, kv_heads = 5, 3, 1
    angles = torch.outer(torch.arange(50.0), 10000.0 ** (-torch.arange(dims / 2) / dims * 2))
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 49, 7, 7, 30])
    buffer = normal(tokens, (heads + 2 * kv_heads) * dims, dtype=dtype)
    expected = buffer.clone()

    def parts(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, _ = qkv.split([heads * dims, kv_heads * dims, kv_heads * dims], dim=1)
        return q.unflatten(1, (heads, dims)), k.unflatten(1, (kv_heads, dims))

    native("rotary", dtype, isa)(*parts(buffer), positions, cos, sin)
    reference.rotary(*parts(expected), positions, cos, sin)
    assert torch.equal(buffer, expected)  # the last third, V, untouched; the rest in torch's own arithmetic
    assert torch.equal(buffer[0], normal(tokens, buffer.shape[1], dtype=dtype)[0])  # position 0 turns nothing


@each_variant
@pytest.mark.parametrize("scale", [1.0, 24.0, 0.875])
@pytest.mark.parametrize("width", WIDTHS)
def test_gather_rows(dtype: torch.dtype, isa: str, width: int, scale: float) -> None:
    table, indices = normal(11, width + 3, dtype=dtype)[:, :width], torch.tensor([10, 0, 3, 3])
    out = native("gather_rows", dtype, isa)(table, indices, scale)
    assert torch.equal(out, reference.gather_rows(table, indices, scale))
    assert torch.equal(out, (table[indices].float() * scale).to(dtype))


@each_variant
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_rms_norm_of_heads_inside_a_fused_buffer(dtype: torch.dtype, isa: str, heads: int, wide_weight: bool) -> None:
    fused, weight = normal(5, 300, dtype=dtype), normal(80, dtype=torch.float32 if wide_weight else dtype, seed=1)
    x = fused[:, 7 : 7 + heads * 80].view(5, heads, 80)
    norm = native("rms_norm", dtype, isa)
    out = norm(x, weight, 1e-6)
    assert out.dtype is dtype and out.shape == x.shape and out.is_contiguous()
    assert ulps(out, reference.rms_norm(x, weight, 1e-6)) <= tight(dtype, isa)
    for head in range(heads):
        assert torch.equal(norm(x[:, head], weight, 1e-6), out[:, head])


@each_variant
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_with_a_wide_weight_round_once(dtype: torch.dtype, isa: str, width: int) -> None:
    x, weight = normal(5, width, dtype=dtype), 1 + normal(width, dtype=torch.float32, seed=1)
    residual = normal(5, width, dtype=dtype, seed=2)
    exact = torch.nn.functional.rms_norm((x + residual).double(), (width,), weight.double(), eps=1e-6).to(dtype)
    out = native("add_rms_norm", dtype, isa)(x, residual, weight, 1e-6)
    assert ulps(out, exact) <= (1 if dtype is torch.bfloat16 else tight(dtype, isa))
    assert torch.equal(out, native("rms_norm", dtype, isa)(residual, weight, 1e-6))
    if dtype is torch.bfloat16:  # rounded twice, every fourth number would be another
        assert (out != exact).sum() <= 1 + out.numel() // 50


@each_variant
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("turning", [60, 34])
def test_norm_rotary_has_the_bits_of_its_steps(dtype: torch.dtype, isa: str, turning: int, wide_weight: bool) -> None:
    """In views of one buffer, in place."""
    angles, positions = torch.rand(9, turning // 2), torch.tensor([8, 0, 3, 3, 5])
    q_weight, k_weight = normal(2, 60, dtype=torch.float32 if wide_weight else dtype, seed=1)
    fused = normal(5, 500, dtype=dtype)
    before, q, k = fused.clone(), fused[:, 20:200].view(5, 3, 60), fused[:, 220:340].view(5, 2, 60)
    norm, asked = native("rms_norm", dtype, isa), (positions, angles.cos(), angles.sin())
    expected = norm(q, q_weight, 1e-6), norm(k, k_weight, 1e-6)
    native("rotary", dtype, isa)(*expected, *asked)
    native("norm_rotary", dtype, isa)(q, k, q_weight, k_weight, 1e-6, *asked)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    for others in (slice(0, 20), slice(200, 220), slice(340, None)):
        assert torch.equal(fused[:, others], before[:, others])


@each_variant
@pytest.mark.parametrize("turning", [0, 2, 34, 60])
def test_rotary_of_the_first_dims(dtype: torch.dtype, isa: str, turning: int) -> None:
    angles = torch.rand(9, turning // 2, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([8, 0, 3, 3, 5])
    q, k = normal(5, 3, 60, dtype=dtype), normal(5, 2, 60, dtype=dtype, seed=1)
    expected = q.clone(), k.clone()
    native("rotary", dtype, isa)(q, k, positions, angles.cos(), angles.sin())
    reference.rotary(*expected, positions, angles.cos(), angles.sin())
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    assert torch.equal(q[..., turning:], normal(5, 3, 60, dtype=dtype)[..., turning:])


@each_variant
@pytest.mark.parametrize("half", WIDTHS)
def test_silu_mul(dtype: torch.dtype, isa: str, half: int) -> None:
    x = normal(5, 2 * half + 3, dtype=dtype)[:, : 2 * half] * 8
    out = native("gate_mul", dtype, isa)(x, "silu")
    assert out.shape == (5, half)
    assert ulps(out, reference.gate_mul(x, "silu")) <= tight(dtype, isa)


@each_variant
@pytest.mark.parametrize("half", WIDTHS)
def test_gelu_tanh_mul(dtype: torch.dtype, isa: str, half: int) -> None:
    x = normal(5, 2 * half + 3, dtype=dtype)[:, : 2 * half] * 4
    out = native("gate_mul", dtype, isa)(x, "gelu_tanh")
    rounding = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(out, reference.gate_mul(x, "gelu_tanh"), rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("isa", ISAS[torch.float32])
def test_gelu_tanh_is_within_an_ulp_or_two_of_the_formula(isa: str) -> None:
    """Closer than torch, which takes 1 + tanh and loses what is small."""
    v = torch.linspace(-9.5, 20, 100_001)[None]
    exact = v.double()
    exact = exact / (1 + (-math.sqrt(8 / math.pi) * (exact + 0.044715 * exact**3)).exp())
    out = native("gate_mul", torch.float32, isa)(torch.cat([v, torch.ones_like(v)], dim=1), "gelu_tanh").double()
    plain = torch.nn.functional.gelu(v, approximate="tanh").double()
    assert (out - exact).abs().max() <= 2e-6 and (plain - exact).abs().max() <= 2e-6
    error = ((out - exact) / exact).abs()
    assert error[v > -1].max() < 4e-7
    assert error[v > -4].max() < 5e-6 if isa != "baseline" else 2e-5


@each_variant
def test_gates_at_their_ends(dtype: torch.dtype, isa: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 90.0, -90.0, 3e38, -3e38, torch.inf, torch.nan, 1e-30, -20.0]]).to(dtype)
    x = torch.cat([gate, torch.ones_like(gate)], dim=1)
    for name, expected in (
        ("silu", torch.nn.functional.silu(gate)),
        ("gelu_tanh", torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        out = native("gate_mul", dtype, isa)(x, name)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-36, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(ISAS)), st.integers(1, 100), st.integers(1, 200), st.integers(0, 2**32))
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    x, residual = normal(rows, 2 * width, dtype=dtype, seed=seed), normal(rows, 2 * width, dtype=dtype, seed=seed + 1)
    weight, row = normal(2 * width, dtype=dtype, seed=2), seed % rows
    alone, company = residual[row : row + 1].clone(), residual.clone()
    normed = ops.add_rms_norm(x, company, weight, 1e-6)
    assert torch.equal(ops.add_rms_norm(x[row : row + 1], alone, weight, 1e-6), normed[row : row + 1])
    assert torch.equal(alone, company[row : row + 1])
    assert torch.equal(ops.rms_norm(alone, weight, 1e-6), normed[row : row + 1])
    for gate in ("silu", "gelu_tanh"):
        assert torch.equal(ops.gate_mul(x[row : row + 1], gate), ops.gate_mul(x, gate)[row : row + 1])
    heads, wide = x.view(rows, 2, width), normal(width, dtype=torch.float32, seed=3)
    for weight in (wide, wide.to(dtype)):
        normed = ops.rms_norm(heads, weight, 1e-6)
        assert torch.equal(ops.rms_norm(heads[row : row + 1], weight, 1e-6), normed[row : row + 1])


@pytest.mark.parametrize("dtype", list(ISAS))
def test_many_rows_on_many_threads(dtype: torch.dtype) -> None:
    x, weight = normal(200, 576, dtype=dtype), normal(576, dtype=dtype, seed=1)
    before = num_threads()
    try:
        results = []
        for threads in (1, 3):
            set_threads(threads)
            heads = ops.rms_norm(x.view(200, 9, 64), weight[:64], 1e-6)
            results.append((ops.rms_norm(x, weight, 1e-6), heads, ops.gate_mul(x, "silu")))
    finally:
        set_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_reference_is_what_transformers_computes() -> None:
    """The oracle itself, once, against the definition in fp64."""
    x, weight = normal(3, 64, dtype=torch.float32), normal(64, dtype=torch.float32, seed=1)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), exact.float())
    assert math.isclose(
        float(reference.gate_mul(torch.tensor([[1.0, 1.0]]), "silu")), 1 / (1 + math.exp(-1)), rel_tol=1e-6
    )
