"""Weights of a softmax and their sums: the reference against the definition, C++ against the reference."""

import math

import pytest
import torch

from kernels import ops
from kernels.cpu import library, softmax
from kernels.cpu.library import ISA_TITLES
from kernels.reference.softmax import group_sums, softmax_weights
from kernels.registry import Accepted

[ISAS] = softmax.ISAS.values()
each_isa = pytest.mark.parametrize("isa", ISAS)
each_width = pytest.mark.parametrize("width", [64, 640, 1216, 64 * 37])
"""Groups fewer than, as many as and more than a vector's lanes, and not a multiple of them."""


def native(isa: str) -> softmax.NativeSoftmaxWeights:
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")
    [candidate] = [each for each in softmax.CANDIDATES if each.name == f"C++ {ISA_TITLES[isa]}"]
    offer = candidate.offer("cpu", torch.float32)
    if not isinstance(offer, Accepted):
        pytest.skip(offer.reason)
    return offer.function


def random_rows(rows: int, width: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * scale


def temperatures(rows: int) -> torch.Tensor:
    return torch.linspace(0.3, 1.7, rows)


def apart(function, x: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(shifted, weights, sums), x left alone."""
    shifted, weights = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    sums = function(x, temperature, shifted, weights)
    return shifted, weights, sums


def test_the_reference_is_the_definition():
    x, temperature = random_rows(3, 640), temperatures(3)
    shifted, weights, sums = apart(softmax_weights, x, temperature)
    share = weights.double() / weights.double().sum(1, keepdim=True)
    torch.testing.assert_close(share, (x.double() / temperature.double()[:, None]).softmax(1), rtol=1e-5, atol=0)
    assert (shifted.amax(1) == 0).all() and (weights.amax(1) == 1).all()
    torch.testing.assert_close(sums, weights.view(3, 64, 10).sum(1))


@each_isa
@each_width
def test_shifts_as_the_reference_does_and_sums_its_own_weights_in_that_order(isa, width):
    x, temperature = random_rows(3, width), temperatures(3)
    shifted, weights, sums = apart(native(isa), x, temperature)
    assert torch.equal(shifted, apart(softmax_weights, x, temperature)[0])
    assert torch.equal(sums, group_sums(weights))


@each_isa
def test_weights_are_close_to_the_exponential(isa):
    x = torch.cat([torch.linspace(-87, 0, 100_000), torch.linspace(-1e-3, 0, 352)]).view(1, -1)
    weights = apart(native(isa), x, torch.ones(1))[1].double()
    exact = x.double().exp()
    assert ((weights - exact) / exact).abs().max() < (1e-6 if isa != "baseline" else 2e-5)


@each_isa
def test_rows_with_little_left(isa):
    """Tokens that are masked, that are as good as impossible, and a temperature at which all others are."""
    x = torch.full((2, 128), -math.inf)
    x[:, [3, 100]], x[:, 5], x[:, 6] = 7.5, -80.0, -3e38
    shifted, weights, sums = apart(native(isa), x, torch.tensor([1.0, 1e-5]))
    assert torch.equal(shifted, apart(softmax_weights, x, torch.tensor([1.0, 1e-5]))[0])
    assert (weights[:, [3, 100]] == 1).all() and weights[0, 5] > 0
    assert weights.count_nonzero(1).tolist() == [3, 2] and sums.sum(1).tolist() == [2.0, 2.0]


@each_isa
@pytest.mark.parametrize("count", [1, 3])
def test_a_row_has_the_same_bits_in_any_company_and_in_place(isa, count, threads):
    x, temperature = random_rows(7, 1216), temperatures(7)
    expected = [apart(native(isa), x[row : row + 1], temperature[row : row + 1]) for row in range(7)]
    threads(count)
    wide = torch.full((2, 7, 1300), 9.0)
    inside, weights = wide[0, :, :1216], wide[1, :, :1216]
    inside.copy_(x)
    sums = native(isa)(inside, temperature, inside, weights)
    for found, parts in zip((inside, weights, sums), zip(*expected, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts))
    assert (wide[:, :, 1216:] == 9).all()


def test_contracts():
    x, temperature = random_rows(2, 128), temperatures(2)
    assert ops.softmax_weights(x, temperature, x.clone(), x.clone()).shape == (2, 2)
    for bad in (
        lambda: ops.softmax_weights(x[:, :100], temperature, x[:, :100], x[:, :100]),
        lambda: ops.softmax_weights(x, temperature[:1], x, x.clone()),
        lambda: ops.softmax_weights(x, temperature.double(), x, x.clone()),
        lambda: ops.softmax_weights(x, temperature, x, x.clone()[:1]),
        lambda: ops.softmax_weights(x, temperature, x, x.double()),
        lambda: ops.softmax_weights(x, temperature, x.T.contiguous().T, x.clone()),
    ):
        with pytest.raises(AssertionError):
            bad()


def test_the_library_serves_where_it_is_loaded():
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")
    x, temperature = random_rows(1, 640), temperatures(1)
    _, weights, _ = apart(ops.softmax_weights, x, temperature)
    best = next(isa for isa in reversed(ISAS) if library.load().refusal("softmax_weights_fp32", isa) is None)
    assert torch.equal(weights, apart(native(best), x, temperature)[1])
