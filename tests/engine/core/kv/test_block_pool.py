import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_tree import PrefixTree, RootKey

KEY = RootKey(None, None)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_active


def test_a_block_outside_the_tree_is_free_again_when_released():
    pool = BlockPool(3)
    block = pool.take()
    assert counts(pool) == (2, 0, 1)
    pool.release(block)
    assert counts(pool) == (3, 0, 0)
    pool.check()


def test_a_block_of_the_tree_is_cached_when_released_and_can_be_acquired_again():
    pool, tree = BlockPool(3), PrefixTree(2)
    block = pool.take()
    tree.insert(tree.root(KEY), block, (1, 2))
    pool.release(block)
    assert counts(pool) == (2, 1, 0) and pool.oldest is block and pool.num_available == 3
    pool.acquire(block)
    assert counts(pool) == (2, 0, 1) and pool.oldest is None
    pool.check()


def test_shared_counts_blocks_with_two_references():
    pool = BlockPool(2)
    block = pool.take()
    for expected in (1, 1):
        pool.acquire(block)
        assert pool.num_shared == expected
    pool.release(block)
    assert pool.num_shared == 1
    pool.release(block)
    assert pool.num_shared == 0
    pool.check()


def test_the_longest_idle_block_goes_first():
    pool, tree = BlockPool(4), PrefixTree(1)
    blocks = [pool.take() for _ in range(3)]
    for number, block in enumerate(blocks):
        tree.insert(tree.root(KEY), block, (number,))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.acquire(blocks[1])
    pool.release(blocks[1])
    order = []
    while (block := pool.oldest) is not None:
        tree.remove(block)
        pool.discard(block)
        order.append(block)
    assert order == [blocks[0], blocks[2], blocks[1]]
    assert counts(pool) == (4, 0, 0)
    pool.check()


def test_the_tail_released_first_is_evicted_first():
    pool, tree = BlockPool(2), PrefixTree(1)
    parent, child = pool.take(), pool.take()
    tree.insert(tree.root(KEY), parent, (1,))
    tree.insert(parent, child, (2,))
    for block in (child, parent):
        pool.release(block)
    assert pool.oldest is child
    pool.check()


def test_check_finds_a_parent_that_would_go_before_its_child():
    pool, tree = BlockPool(2), PrefixTree(1)
    parent, child = pool.take(), pool.take()
    tree.insert(tree.root(KEY), parent, (1,))
    tree.insert(parent, child, (2,))
    for block in (parent, child):
        pool.release(block)
    with pytest.raises(AssertionError, match="evicted before"):
        pool.check()


def test_check_finds_a_wrong_shared_count():
    pool = BlockPool(2)
    pool.num_shared = 1
    with pytest.raises(AssertionError):
        pool.check()


def lines_run(call: Callable[[], object]) -> int:
    """Lines of engine/core/kv that `call` executes: a measure of work that no clock disturbs, nor what a garbage
    collection in between calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if Path(frame.f_code.co_filename).parent.name != "kv":
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("cached", [False, True])
def test_every_verb_costs_the_same_in_a_small_and_a_large_pool(cached: bool):
    work = []
    for size in (10, 20_000):
        pool, tree = BlockPool(size), PrefixTree(1)
        held = [pool.take() for _ in range(size - 1)]
        for number, block in enumerate(held):
            if cached:
                tree.insert(tree.root(KEY), block, (number,))
            pool.release(block)

        def cycle(pool: BlockPool = pool, tree: PrefixTree = tree) -> None:
            if cached:
                block = pool.oldest
                assert block is not None
                tree.remove(block)
                pool.discard(block)
            block = pool.take()
            tree.insert(tree.root(KEY), block, (-1,))
            pool.acquire(block)
            pool.release(block)
            pool.release(block)

        work.append(lines_run(cycle))
    assert work[0] == work[1] > 0
