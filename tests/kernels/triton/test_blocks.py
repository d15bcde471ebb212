"""Copying blocks in Triton, against the reference."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.triton import blocks

PAGE = 4096


def random_blocks(count: int, pages: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, pages * PAGE), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_copies_are_applied_in_order(pages: int) -> None:
    pool = random_blocks(6, pages)
    before = pool.clone()
    blocks.copy_blocks(pool, [(0, 1), (1, 2), (4, 4), (5, 0)])
    assert torch.equal(pool, before[[5, 0, 0, 3, 4, 5]])
    for nothing in ([], [(3, 3)]):
        blocks.copy_blocks(pool, nothing)
        assert torch.equal(pool, before[[5, 0, 0, 3, 4, 5]])


PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


@settings(max_examples=25, deadline=None)
@given(PAIRS)
def test_any_copies_give_what_the_reference_gives(pairs: list[tuple[int, int]]) -> None:
    pool = random_blocks(6)
    expected = pool.clone()
    reference.copy_blocks(expected, pairs)
    blocks.copy_blocks(pool, pairs)
    assert torch.equal(pool, expected)


@settings(max_examples=200, deadline=None)
@given(PAIRS.filter(bool))
def test_in_a_run_nobody_touches_what_another_writes(pairs: list[tuple[int, int]]) -> None:
    """A GPU copies a run's blocks in any order, which the interpreter does not show."""
    start = 0
    for count in blocks._side_by_side(pairs):
        run = pairs[start : start + count]
        written = [target for _, target in run]
        assert len(set(written)) == count
        for place, target in enumerate(written):
            assert all(source != target for other, (source, _) in enumerate(run) if other != place)
        start += count
    assert start == len(pairs)


def test_copies_that_do_not_meet_are_one_launch() -> None:
    """What the KV manager plans: no destination is read in the same step, sources may be read by many."""
    assert list(blocks._side_by_side([(0, 1), (0, 2), (3, 4), (3, 5)])) == [4]
    assert list(blocks._side_by_side([(0, 1), (1, 2), (3, 1)])) == [1, 1, 1]


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("ids", [[4, 0, 2], [5], []])
def test_blocks_leave_and_come_back(pages: int, ids: list[int]) -> None:
    pool, chosen = random_blocks(6, pages), torch.tensor(ids, dtype=torch.int64)
    before, out = pool.clone(), torch.full((len(ids), pages * PAGE), 255, dtype=torch.uint8)
    blocks.gather_blocks(pool, chosen, out)
    assert torch.equal(out, before[ids]) and torch.equal(pool, before)
    pool[ids] = 255
    blocks.scatter_blocks(out, chosen, pool)
    assert torch.equal(pool, before)


def test_offsets_are_64_bit(far_memory: Callable[[int], torch.Tensor]) -> None:
    """The last block begins behind 2**31 words."""
    count = 2**31 * 8 // PAGE + 2
    pool = far_memory(count * PAGE).view(count, PAGE)
    content, out = random_blocks(1), torch.zeros(1, PAGE, dtype=torch.uint8)
    blocks.scatter_blocks(content, torch.tensor([count - 1]), pool)
    blocks.copy_blocks(pool, [(count - 1, 0), (count - 1, count - 2)])
    for block in (0, count - 1, count - 2):
        blocks.gather_blocks(pool, torch.tensor([block]), out)
        assert torch.equal(out, content) and torch.equal(pool[block], content[0])
