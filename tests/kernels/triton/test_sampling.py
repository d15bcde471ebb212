"""Draws in Triton: the reference's tokens, all of them."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton.language as tl
from draws import OFF, apart, columns, normal_logits
from triton.runtime import interpreter

from kernels import reference
from kernels.triton import sampling

LIMITS = [
    OFF,
    (20, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.05),
    (20, 0.8, 0.0),
    (0, 0.999, 0.01),
    (40, 0.95, 0.1),
    (1, 1.0, 0.0),
    (150, 0.5, 0.0),
    (0, 0.0, 0.0),
    (10**6, 0.6, 0.0),
    (10**6, 1.0, 0.0),
    (0, 1.0, 1.0),
]


def sort(x: tl.tensor, dim: int | None = None, descending: bool = False) -> tl.tensor:
    """`tl.sort` of one dim, by numpy. The interpreter takes seconds for a thousand numbers."""
    assert descending and x.handle.data.ndim == 1
    return tl.tensor(interpreter.TensorHandle(np.sort(x.handle.data)[::-1].copy(), x.handle.dtype), x.type)


@pytest.fixture
def quick_sort(monkeypatch) -> None:
    monkeypatch.setattr(tl, "sort", sort)


@pytest.fixture(params=["sorted", "searched"])
def small(request, monkeypatch, quick_sort) -> None:
    """Small tiles and groups; with enough room for candidates, or with so little that most rows have more of them."""
    monkeypatch.setattr(sampling, "GROUP", 16)
    monkeypatch.setattr(sampling, "TILE", 128)
    monkeypatch.setattr(sampling, "CANDIDATES", 512 if request.param == "sorted" else 8)


def assert_drawn_alike(logits: torch.Tensor, arguments: tuple[torch.Tensor, ...]) -> None:
    found = sampling.draw(logits, *arguments)
    assert found.dtype == torch.int64 and found.tolist() == reference.draw(logits, *arguments).tolist()


def test_rows_under_all_limits(small):
    spread = torch.tensor([3.0, 0.5]).repeat(7)[:13, None]
    assert_drawn_alike(apart(normal_logits(13, 300) * spread), columns(13, LIMITS, [1.0, 1.0, 0.6]))


def test_many_draws_of_one_row(small):
    """Whoever is kept wrongly is drawn sooner or later: temperatures are high, and the kept ones few."""
    logits = normal_logits(1, 120, 1.0).expand(18, 120)
    assert_drawn_alike(logits, columns(18, [(9, 1.0, 0.0), (0, 0.2, 0.0), (12, 0.7, 0.0)], [3.0]))


def test_walks_of_many_rounds(quick_sort, monkeypatch):
    """Each round takes what the rounds before left."""
    monkeypatch.setattr(sampling, "GROUP", 8)
    monkeypatch.setattr(sampling, "TILE", 32)
    arguments = columns(12, [(0, 0.3, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1)], [1.5])
    assert_drawn_alike(normal_logits(12, 200), arguments)


@pytest.mark.parametrize("vocab", [1, 17, 127, 128, 129])
def test_edges_of_tiles(small, vocab):
    arguments = columns(4, [OFF, (2, 1.0, 0.0), (0, 0.7, 0.0), (3, 0.9, 0.2)])
    assert_drawn_alike(normal_logits(4, vocab, seed=vocab), arguments)


def test_ties(small):
    """Equal logits are cut by their ids: with all equal, in many groups, and with 0 beside -0."""
    logits = torch.zeros(15, 120)
    logits[5:10] = torch.tensor([0.0, -0.0, 2.0, -1.0, 2.0]).repeat(24)
    logits[10:] = torch.randint(-2, 3, (5, 120), generator=torch.Generator().manual_seed(0)).float()
    limits = [(60, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.7), (60, 0.8, 0.0), (60, 0.9, 0.1)]
    assert_drawn_alike(logits, columns(15, limits, [5.0]))


def test_cuts_between_equal_tokens(small):
    """Of 119 equal tokens, some of them -0, the first or none stays beside the 100th; all that stay are as likely."""
    logits = torch.zeros(6, 120)
    logits[:, ::2] = -0.0
    logits[:, 99] = 1.0
    drawn = sampling.draw(logits, *columns(6, [(2, 1.0, 0.0), (2, 1.0, 0.0), (60, 1e-3, 0.0)], [1e9]))
    assert set(drawn.tolist()) == {0, 99} and set(drawn[2::3].tolist()) == {99}
    logits[:, 99] = 0.0
    assert sampling.draw(logits[:3], *columns(3, [(1, 1.0, 0.0)])).tolist() == [0] * 3


def test_extremes(small):
    """Values at the ends of fp32, tiny differences, and so few finite ones that nothing can be cut."""
    far = torch.full((200,), -3e38)
    far[::3] = torch.linspace(-40.0, 88.0, 67)
    close = torch.full((200,), 1.0)
    close[50:] = 1.0 + torch.arange(150) * 2.0**-23
    few = torch.full((200,), -math.inf)
    few[[5, 77, 78, 199]] = torch.tensor([1e-40, -1e-40, 0.0, -2.0])
    low = normal_logits(1, 200)[0] - 1e5
    logits = torch.stack([far, close, few, low]).repeat(3, 1)
    assert_drawn_alike(logits, columns(12, [OFF, (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (7, 0.7, 0.0)]))


def test_greedy_rows_and_rows_that_are_not_finite(small):
    nan, inf = math.nan, math.inf
    rows = [[0.0, nan, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0], [-inf, 1.0, -inf], [-1.0, -0.0, 0.0], [nan, nan, inf]]
    logits = torch.full((6, 150), -inf)
    logits[:, 130:133] = torch.tensor(rows)
    for limits in (OFF, (2, 0.9, 0.1), (0, 0.9, 0.0)):
        cold = columns(6, [limits], [0.0, 9e-6, 0.0, 0.0, 0.0, 1.0])
        assert sampling.draw(logits, *cold).tolist() == [-1, -1, -1, 131, 131, -1]
        warm = columns(4, [limits])
        assert sampling.draw(logits[:4], *warm).tolist() == [-1, -1, -1, 131]


def test_company_and_the_number_of_programs_do_not_matter(small, monkeypatch):
    logits, arguments = normal_logits(4, 300), columns(4, [OFF, (0, 0.8, 0.0), (0, 0.6, 0.0), (20, 0.9, 0.1)], [2.0])
    logits[:, :128] -= 5.0
    together = reference.draw(logits, *arguments).tolist()
    for programs in (1, 1000):
        monkeypatch.setattr(sampling, "PROGRAMS", programs)
        assert sampling.draw(logits, *arguments).tolist() == together
    for order in ([3, 0, 0], [1]):
        some = sampling.draw(logits[order], *(each[order] for each in arguments))
        assert some.tolist() == [together[row] for row in order]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_narrow_dtypes(small, dtype):
    """Many are equal."""
    assert_drawn_alike(apart(normal_logits(6, 200).to(dtype), dtype, gap=1), columns(6, LIMITS[:6]))


def test_seeds_choices_and_positions_count(small):
    numbers = torch.tensor([0, 1, -1, 2**31, 2**32 + 1, -(2**63), 2**63 - 1])
    zeros = torch.zeros_like(numbers)
    logits = normal_logits(1, 150).expand(7, 150)
    for name in ("seeds", "choices", "positions"):
        given = {"seeds": zeros, "choices": zeros, "positions": zeros, name: numbers}
        assert_drawn_alike(logits, columns(7, [OFF, (0, 1.0, 0.01)], [2.0], **given))


def test_tritons_own_sort(monkeypatch):
    monkeypatch.setattr(sampling, "CANDIDATES", 16)
    assert_drawn_alike(normal_logits(3, 300), columns(3, [(5, 1.0, 0.0), (12, 0.8, 0.0), (0, 0.9, 0.0)]))


def test_the_sizes_that_serve(quick_sort):
    """A vocabulary of many tiles, an odd one; rows that are sorted and, at high temperature, rows that are searched."""
    logits = apart(normal_logits(6, 9001, 2.0))
    limits = [OFF, (50, 0.95, 0.0), (0, 0.9, 0.0), (0, 0.9, 0.0), (3000, 0.9, 0.0), (0, 1.0, 0.02)]
    assert_drawn_alike(logits, columns(6, limits, [1.0, 0.7, 0.6, 3.0, 3.0, 1.0]))
    assert sampling.draw(logits[:0], *(each[:0] for each in columns(6, limits))).tolist() == []


def test_a_vocabulary_of_more_than_2_to_the_18(quick_sort):
    """Gemma 3's. Nine tenths of the weight are in its last tile, a short one."""
    logits = normal_logits(4, 262208)
    logits[:, 2**18 :] = torch.linspace(10.5, 11.5, 64)
    assert_drawn_alike(logits, columns(4, [OFF, OFF, (0, 0.85, 0.0), (50, 1.0, 0.0)], [0.0, 1.0, 1.0, 1.0]))


def test_offsets_are_64_bit(quick_sort, far_memory: Callable[[int], torch.Tensor]):
    """The last row begins behind 2**31 numbers."""
    far, vocab = 2**30 + 8, 140
    logits = far_memory(2 * (2 * far + vocab)).view(torch.float16).as_strided((3, vocab), (far, 1))
    logits.copy_(normal_logits(3, vocab))
    for temperature, limits in ((0.0, OFF), (1.0, OFF), (1.0, (0, 0.7, 0.0)), (1.0, (12, 0.9, 0.1))):
        assert_drawn_alike(logits, columns(3, [limits], [temperature]))
