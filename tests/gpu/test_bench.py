"""How the check script judges: errors, bits and times, before any kernel is asked."""

from pathlib import Path

import pytest
import torch
from gpu.bench import Bench, check_error, check_products, equal, poisoned
from gpu.checks.offline import covered
from gpu.findings import Findings


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(Findings(), tmp_path, is_tiny=True)


@pytest.mark.parametrize(
    ("found", "ok"),
    [(0.0, True), (0.019, True), (0.021, False), (float("nan"), False), (float("inf"), False)],
)
def test_errors_are_judged_by_those_of_plain_torch(bench: Bench, found: float, ok: bool) -> None:
    exact = torch.zeros(4)
    plain, ours = exact.clone(), exact.clone()
    plain[1], ours[2] = 0.01, found
    check_error(bench.findings, "it", ours, exact, plain)
    assert bench.findings.lines[0].ok is ok


def test_products_of_fp32_are_judged_by_the_norms_of_their_factors(bench: Bench) -> None:
    """Sums of three products of tf32, truncated, are right; those of one are not."""
    x, weight = bench.normal(40, 1536, seed=1), bench.normal(70, 1536, seed=2)
    exact = x.double() @ weight.double().T
    three = sum(a @ b.T for a in parts_of_tf32(x) for b in parts_of_tf32(weight))
    three *= 1 - 2.0**-17  # as if each of 64 additions had cut off 2^-23 of the sum
    one = parts_of_tf32(x)[0] @ parts_of_tf32(weight)[0].T
    for found in (exact.float(), three, one, torch.full_like(exact, torch.nan)):
        check_products(bench.findings, "it", found, exact, x, weight)
    assert [line.ok for line in bench.findings.lines] == [True, True, False, False]
    assert bench.findings.lines[2].numbers["error"] > 8 * bench.findings.lines[2].numbers["allowed"]


def parts_of_tf32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tf32 holds of fp32, rounded to the nearest, and what it holds of the rest, in fp64."""
    high = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    low = ((x - high).view(torch.int32) & ~0x1FFF).view(torch.float32)
    return high.double(), low.double()


def test_bits_are_compared_and_not_values(bench: Bench) -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert equal(nan, nan.clone()) and not equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not equal(nan, nan.double()) and not equal(nan, nan[:1])
    numbers = iter([1.0, 1.0, 1.0, 2.0])
    for _ in range(2):
        bench.same_bits("it", lambda: torch.tensor(next(numbers)))
    assert [line.ok for line in bench.findings.lines] == [True, False]


@pytest.mark.parametrize("shape", [(3, 64), (3, 2, 48), (1, 16)])
def test_rows_lie_apart_as_far_as_a_model_s_kernels_are_compiled_for(bench: Bench, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    apart = bench.rows_apart(x)
    width = x[0].numel()
    assert equal(apart, x) and apart.stride(0) % 16 == 0 and apart.stride(0) > width
    whole = torch.as_strided(apart, (len(x), apart.stride(0)), (apart.stride(0), 1))
    assert whole[:, width:].isnan().all()


def test_unwritten_memory_is_poisoned() -> None:
    with poisoned():
        assert torch.empty((2, 3)).isnan().all() and (torch.empty(4, dtype=torch.int64) == 77).all()
    assert torch.empty(0).shape == (0,)


def test_time_that_ranges_cover() -> None:
    assert covered([(0, 2), (1, 3), (10, 12), (10, 11)]) == (5, 12)


def test_a_failed_case_is_told_and_the_next_one_runs(bench: Bench) -> None:
    for number in (0, 1):
        with bench.findings.case(f"case {number}"):
            bench.findings.verdict("it", 1 // number == 1)
    assert [(line.what, line.ok) for line in bench.findings.lines] == [("case 0", False), ("it", True)]
    assert "ZeroDivisionError" in bench.findings.lines[0].text


def test_shares_deal_all_cases(tmp_path: Path) -> None:
    cases = list(range(10))
    dealt = [Bench(Findings(), tmp_path, False, share, 4).mine([], cases) for share in range(4)]
    assert sorted(case for some in dealt for case in some) == cases
