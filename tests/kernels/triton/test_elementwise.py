"""Norms, rotary embedding, gates and rows of tables in Triton, against the reference in fp32 and in low precision."""

import math
from collections.abc import Callable

import pytest
import torch
from error_rule import assert_near

from kernels import ops
from kernels.reference import elementwise as reference
from kernels.triton import elementwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Rotary = Callable[[torch.Tensor, torch.Tensor], None]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(rows: int, width: int, dtype: torch.dtype, seed: int = 0, between: int = 3) -> torch.Tensor:
    """[rows, width], each row followed by `between` numbers that are NaN."""
    whole = torch.full((rows, width + between), torch.nan, dtype=dtype)
    whole[:, :width] = normal(rows, width, dtype=dtype, seed=seed)
    return whole[:, :width]


# ------------------------------------------------------------------ norms
@each_dtype
@pytest.mark.parametrize("width", [576, 1, 33, 2048, 3000])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = strided(5, width, dtype), normal(width, dtype=dtype, seed=1)
    found = elementwise.rms_norm(x, weight, 1e-5)
    assert_near(found, reference.rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5))
    assert found.is_contiguous()


@each_dtype
@pytest.mark.parametrize(("heads", "width", "wide_weight"), [(1, 80, True), (7, 64, False), (3, 256, True)])
def test_rms_norm_of_heads_inside_a_fused_buffer(dtype: torch.dtype, heads: int, width: int, wide_weight: bool) -> None:
    x = strided(5, heads * width, dtype, between=129).view(5, heads, width)
    weight = 1 + normal(width, dtype=torch.float32 if wide_weight else dtype, seed=1)
    found = elementwise.rms_norm(x, weight, 1e-6)
    assert_near(found, reference.rms_norm(x, weight, 1e-6), reference.rms_norm(x.float(), weight.float(), 1e-6))
    assert found.shape == x.shape and found.is_contiguous()
    for head in range(heads):
        assert torch.equal(elementwise.rms_norm(x[:, head], weight, 1e-6), found[:, head])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wide_weight_rounds_once_and_another_twice(dtype: torch.dtype) -> None:
    """The sum of squares may differ in its last bit, so that one number in hundreds may fall to the other side."""
    x, weight = normal(32, 512, dtype=dtype), 1 + normal(512, dtype=torch.float32, seed=1)
    once, twice = reference.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight.to(dtype), 1e-6)
    for given, expected in ((weight, once), (weight.to(dtype), twice)):
        differing = (elementwise.rms_norm(x, given, 1e-6) != expected).float().mean()
        assert differing < 0.01, differing
    assert (once != reference.rms_norm(x, weight.to(dtype).float(), 1e-6)).float().mean() > 0.05  # it would be seen


@each_dtype
@pytest.mark.parametrize("width", [576, 33, 2500])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_add_rms_norm(dtype: torch.dtype, width: int, wide_weight: bool) -> None:
    x, residual = strided(5, width, dtype), strided(5, width, dtype, seed=2, between=7)
    weight, total = normal(width, dtype=torch.float32 if wide_weight else dtype, seed=1), x + residual
    beyond = residual.as_strided((5, 7), residual.stride(), width)
    found = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total) and beyond.isnan().all()
    low, exact = reference.rms_norm(total, weight, 1e-5), reference.rms_norm(total.float(), weight.float(), 1e-5)
    assert_near(found, low, exact)
    assert torch.equal(found, elementwise.rms_norm(total, weight, 1e-5))


@each_dtype
def test_norms_of_zeros_and_of_large_numbers(dtype: torch.dtype) -> None:
    weight = torch.ones(64, dtype=dtype)
    assert not elementwise.rms_norm(torch.zeros(1, 64, dtype=dtype), weight, 1e-5).any()
    large = torch.full((1, 64), 6e4, dtype=dtype)
    torch.testing.assert_close(elementwise.rms_norm(large, weight, 1e-5), torch.ones(1, 64, dtype=dtype))


# ------------------------------------------------------------------ rotary embedding
def angles(positions: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.outer(torch.arange(float(positions)), 10000.0 ** (-torch.arange(float(half)) / max(half, 1)))
    return turns.cos(), turns.sin()


def parts_of(fused: torch.Tensor, heads: tuple[int, int], dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _ = fused.split([heads[0] * dims, heads[1] * dims, fused.shape[1] - sum(heads) * dims], dim=1)
    return q.unflatten(1, (heads[0], dims)), k.unflatten(1, (heads[1], dims))


@each_dtype
@pytest.mark.parametrize(
    ("heads", "dims", "half"),
    [((3, 1), 64, 32), ((1, 1), 6, 3), ((9, 3), 80, 40), ((40, 37), 34, 17), ((4, 2), 60, 15)],
)
def test_rotary_has_the_references_bits(dtype: torch.dtype, heads: tuple[int, int], dims: int, half: int) -> None:
    """Views of one buffer, in place; the last part, V, stays, and so does what does not turn."""
    cos, sin = angles(50, half)
    positions = torch.tensor([0, 49, 7, 7, 30])
    fused = strided(5, sum(heads) * dims + 24, dtype)
    before, expected = fused.clone(), fused.clone()
    elementwise.rotary(*parts_of(fused, heads, dims), positions, cos, sin)
    reference.rotary(*parts_of(expected, heads, dims), positions, cos, sin)
    assert torch.equal(fused, expected)
    assert torch.equal(fused[0], before[0]) and torch.equal(fused[:, -24:], before[:, -24:])


def test_rotary_of_nothing_turns_nothing() -> None:
    q, k = normal(2, 3, 8, dtype=torch.float32), normal(2, 1, 8, dtype=torch.float32, seed=1)
    expected = q.clone(), k.clone()
    elementwise.rotary(q, k, torch.tensor([1, 0]), *angles(2, 0))
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


@each_dtype
@pytest.mark.parametrize(
    ("heads", "dims", "half", "wide_weight"),
    [
        ((8, 2), 64, 32, False),
        ((7, 1), 80, 40, True),
        ((3, 3), 60, 15, True),
        ((3, 3), 60, 15, False),
        ((40, 8), 32, 16, False),
    ],
)
def test_norm_rotary(dtype: torch.dtype, heads: tuple[int, int], dims: int, half: int, wide_weight: bool) -> None:
    cos, sin = angles(50, half)
    positions = torch.tensor([0, 49, 7, 7, 30])
    weights = [1 + normal(dims, dtype=torch.float32 if wide_weight else dtype, seed=seed) for seed in (1, 2)]
    fused = strided(5, sum(heads) * dims + 24, dtype)
    low, exact, last = fused.clone(), fused.float(), fused[:, -24:].clone()
    elementwise.norm_rotary(*parts_of(fused, heads, dims), *weights, 1e-6, positions, cos, sin)
    reference.norm_rotary(*parts_of(low, heads, dims), *weights, 1e-6, positions, cos, sin)
    exact_weights = (weight.float() for weight in weights)
    reference.norm_rotary(*parts_of(exact, heads, dims), *exact_weights, 1e-6, positions, cos, sin)
    assert_near(fused, low, exact)
    assert torch.equal(fused[:, -24:], last)
    if dtype is not torch.float32:  # it rounds where the reference rounds
        assert (fused != low).float().mean() < 0.01


# ------------------------------------------------------------------ gates
@each_dtype
@pytest.mark.parametrize("gate", ops.GATES)
@pytest.mark.parametrize("half", [33, 1024, 1100])
def test_gate_mul(dtype: torch.dtype, gate: ops.Gate, half: int) -> None:
    x = strided(4, 2 * half, dtype)
    x[:, :half] *= 3
    found = elementwise.gate_mul(x, gate)
    low, exact = reference.gate_mul(x, gate), reference.gate_mul(x.float(), gate)
    assert_near(found, low, exact)
    if dtype is not torch.float32:  # the gate is rounded before the product
        gates, up = x.chunk(2, dim=-1)
        assert (found != gated(gates.double(), gate).to(dtype) * up).float().mean() < 0.01


def gated(x: torch.Tensor, gate: ops.Gate) -> torch.Tensor:
    """Far below 0 torch's own GELU is the difference of nearly equal numbers."""
    z = x if gate == "silu" else math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
    return x * torch.sigmoid(z)


@each_dtype
@pytest.mark.parametrize("gate", ops.GATES)
def test_gates_of_large_and_special_numbers(dtype: torch.dtype, gate: ops.Gate) -> None:
    gates = torch.tensor([-1e4, -200.0, -30.0, -0.0, 0.0, 30.0, 200.0, 1e4, torch.inf, torch.nan], dtype=dtype)
    found = elementwise.gate_mul(torch.cat([gates, torch.ones_like(gates)])[None], gate)
    torch.testing.assert_close(found[0, :9], gates[:9].clamp(min=0), rtol=0, atol=1e-9)
    assert found[0, 9].isnan()


# ------------------------------------------------------------------ rows of tables
@each_dtype
@pytest.mark.parametrize("scale", [1.0, 24.0, 0.875])
@pytest.mark.parametrize("width", [33, 1, 1024, 1100])
def test_gather_rows_has_the_references_bits(dtype: torch.dtype, width: int, scale: float) -> None:
    table, indices = strided(11, width, dtype), torch.tensor([10, 0, 3, 3])
    assert torch.equal(elementwise.gather_rows(table, indices, scale), reference.gather_rows(table, indices, scale))


def test_plain_rows_are_copied_bit_for_bit() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(4, -1)  # NaN of all kinds among them
    found = elementwise.gather_rows(bits.view(torch.bfloat16), torch.tensor([2, 1]), 1.0)
    assert torch.equal(found.view(torch.int16), bits[[2, 1]])


def test_offsets_are_64_bit(far_memory: Callable[[int], torch.Tensor]) -> None:
    """Rows whose last one lies 2**31 numbers away."""
    far, width = 2**31 // 3 + 64, 64
    rows = far_memory(2 * (3 * far + width)).view(torch.float16).as_strided((4, width), (far, 1))
    rows.copy_(normal(4, width, dtype=torch.float16))
    weight = torch.ones(width, dtype=torch.float16)
    assert torch.equal(elementwise.gather_rows(rows, torch.tensor([3]), 1.0), rows[3:])
    dense = rows.clone()
    assert torch.equal(elementwise.rms_norm(rows, weight, 1e-6), elementwise.rms_norm(dense, weight, 1e-6))
    assert torch.equal(elementwise.gate_mul(rows, "silu"), elementwise.gate_mul(dense, "silu"))
    q, k, positions, table = rows[:, :48].view(4, 3, 16), rows[:, 48:].view(4, 1, 16), torch.arange(4), angles(4, 8)
    elementwise.rotary(q, k, positions, *table)
    elementwise.rotary(dense[:, :48].view(4, 3, 16), dense[:, 48:].view(4, 1, 16), positions, *table)
    assert torch.equal(rows, dense)
    assert torch.equal(elementwise.add_rms_norm(dense, rows, weight, 1e-6), elementwise.rms_norm(rows, weight, 1e-6))


# ------------------------------------------------------------------ company
@each_dtype
def test_a_row_has_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    """At any place among others, of heads that share a program with it and of those that do not."""
    x, others = strided(37, 3 * 64, dtype), normal(37, 192, dtype=dtype, seed=1)
    weight, head_weight = normal(192, dtype=dtype, seed=2), normal(64, dtype=dtype, seed=3)
    positions, table = torch.arange(37) % 11, angles(11, 32)

    def results(rows: slice) -> list[torch.Tensor]:
        mine, residual, fused = x[rows], others[rows].clone(), x[rows].clone()
        elementwise.norm_rotary(
            *parts_of(fused, (2, 1), 64), head_weight, head_weight, 1e-6, positions[rows], *table
        )  # fmt: skip
        return [
            elementwise.rms_norm(mine, weight, 1e-6),
            elementwise.rms_norm(mine.view(-1, 3, 64), head_weight, 1e-6),
            elementwise.add_rms_norm(mine, residual, weight, 1e-6),
            residual,
            fused,
            *(elementwise.gate_mul(mine, gate) for gate in ops.GATES),
        ]

    together = results(slice(None))
    for row in (0, 10, 36):
        for alone, company in zip(results(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], company[row])


def test_no_rows_at_all() -> None:
    x, weight, none = torch.ones(0, 64), torch.ones(64), torch.zeros(0, dtype=torch.int64)
    assert elementwise.rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert elementwise.gate_mul(x, "silu").shape == (0, 32)
    assert elementwise.gather_rows(torch.ones(2, 64), none, 1.0).shape == (0, 64)
    elementwise.rotary(x.view(0, 2, 32), x.view(0, 2, 32), none, *angles(2, 16))
