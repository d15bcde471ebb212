from sys import maxsize

import pytest

from engine.core.kv.block import NO_EXTENT, Block, RootKey
from engine.core.kv.prefix_tree import MAX_EXAMINED, PrefixTree

KEY = RootKey(None, None)
CYCLE = (1 << 61) - 1
"""Python's hash of an int is the int modulo this: two ints this far apart collide."""


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(4)


def chain(tree: PrefixTree, *runs: tuple[int, ...], key: RootKey = KEY, first_id: int = 0) -> list[Block]:
    blocks, parent = [], tree.root(key)
    for number, tokens in enumerate(runs):
        block = Block(first_id + number)
        tree.insert(parent, block, tokens)
        blocks.append(block)
        parent = block
    tree.check()
    return blocks


def test_walk_finds_whole_blocks_in_order(tree: PrefixTree):
    one, two = chain(tree, (1, 2, 3, 4), (5, 6, 7, 8))
    root = tree.root(KEY)
    assert tree.walk(root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 0, 8) == [one, two]
    assert tree.walk(root, [1, 2, 3, 4, 5, 6, 7, 0], 0, 8) == [one]
    assert tree.walk(root, [1, 2, 3, 4, 5, 6, 7, 8], 0, 7) == [one]
    assert tree.walk(one, [1, 2, 3, 4, 5, 6, 7, 8], 4, 8) == [two]
    assert tree.walk(root, [0, 2, 3, 4], 0, 4) == []


def test_the_same_tokens_at_another_place_are_another_block(tree: PrefixTree):
    chain(tree, (1, 1, 1, 1), (2, 2, 2, 2))
    assert tree.walk(tree.root(KEY), [2, 2, 2, 2], 0, 4) == []


def test_a26_equal_hashes_do_not_make_equal_blocks(tree: PrefixTree):
    tokens, twin = (1, 2, 3, 4), (1 + CYCLE, 2, 3, 4)
    assert hash(tokens) == hash(twin) and tokens != twin
    (block,) = chain(tree, tokens)
    root = tree.root(KEY)
    assert tree.walk(root, twin, 0, 4) == []
    assert tree.best_partial(root, twin, maxsize) == (None, 0)
    other = Block(9)
    tree.insert(root, other, twin)
    tree.check()
    assert tree.walk(root, tokens, 0, 4) == [block] and tree.walk(root, twin, 0, 4) == [other]


def test_open_nodes_are_never_shared_whole(tree: PrefixTree):
    chain(tree, (1, 2, 3))
    assert tree.walk(tree.root(KEY), [1, 2, 3, 4, 5], 0, 5) == []


@pytest.mark.parametrize(
    ("tokens", "length"), [([1, 2, 3], 3), ([1, 2, 9], 2), ([1], 1), ([2], 0), ([], 0), ([1, 2, 3, 4, 5], 4)]
)
def test_best_partial_is_the_longest_common_head(tree: PrefixTree, tokens: list[int], length: int):
    (full,) = chain(tree, (1, 2, 3, 4))
    tree.insert(tree.root(KEY), Block(5), (1, 9))
    block, found = tree.best_partial(tree.root(KEY), tokens, maxsize)
    assert found == length
    assert length < 2 or block is full


def test_best_partial_leaves_out_what_this_step_computes(tree: PrefixTree):
    (block,) = chain(tree, (1, 2, 3, 4))
    block.computed_in = 7
    assert tree.best_partial(tree.root(KEY), [1, 2], before=7) == (None, 0)
    assert tree.best_partial(tree.root(KEY), [1, 2], before=8) == (block, 2)


def test_best_partial_examines_the_newest_children_only(tree: PrefixTree):
    root = tree.root(KEY)
    first = Block(0)
    tree.insert(root, first, (1, 2, 3))
    for number in range(MAX_EXAMINED - 1):
        tree.insert(root, Block(number + 1), (1, 100 + number))
    assert tree.best_partial(root, [1, 2, 3], maxsize) == (first, 3)
    tree.insert(root, Block(99), (1, 999))
    assert tree.best_partial(root, [1, 2, 3], maxsize)[1] == 1


def test_full_children_of_one_parent_are_unique(tree: PrefixTree):
    chain(tree, (1, 2, 3, 4))
    with pytest.raises(AssertionError, match="unique"):
        tree.insert(tree.root(KEY), Block(9), (1, 2, 3, 4))


def test_remove_takes_leaves_and_empty_roots(tree: PrefixTree):
    one, two = chain(tree, (1, 2, 3, 4), (5,))
    with pytest.raises(AssertionError, match="has children"):
        tree.remove(one)
    for block in (two, one):
        tree.remove(block)
        assert block.parent is None and block.tokens == ()
        tree.check()
    assert tree.roots == {}


def test_replace_keeps_the_children(tree: PrefixTree):
    old, full, opened = (*chain(tree, (1, 2, 3, 4), (5, 6, 7, 8)), Block(7))
    tree.insert(old, opened, (5, 9))
    new = Block(8)
    tree.replace(old, new)
    tree.check()
    assert old.parent is None and not old.heads and not old.children
    assert tree.walk(tree.root(KEY), [1, 2, 3, 4, 5, 6, 7, 8], 0, 8) == [new, full]
    assert opened.parent is new


def test_a27_salt_and_adapter_are_different_things(tree: PrefixTree):
    chain(tree, (1, 2, 3, 4), key=RootKey("x", None))
    for key in (RootKey(None, "x"), RootKey("x", "x"), RootKey(None, None), RootKey("", None), RootKey("y", None)):
        assert key not in tree.roots
    tree.check()


def test_check_finds_a_child_with_the_wrong_parent(tree: PrefixTree):
    _, two = chain(tree, (1, 2, 3, 4), (5, 6, 7, 8))
    two.parent = tree.root(KEY)
    with pytest.raises(AssertionError):
        tree.check()


def test_check_finds_an_open_node_with_children(tree: PrefixTree):
    one, _ = chain(tree, (1, 2, 3, 4), (5, 6, 7, 8))
    root = tree.root(KEY)
    del root.children[one.tokens]
    one.tokens = (1, 2, 3)
    with pytest.raises(AssertionError, match="open and has children"):
        tree.check()


def test_what_lacks_an_extent_is_no_partial_match(tree: PrefixTree):
    whole, lacking = Block(0, 2), Block(1, 2)
    whole.extents = [3, 4]
    lacking.extents = [3, NO_EXTENT]
    root = tree.root(KEY)
    tree.insert(root, whole, (1, 2))
    tree.insert(root, lacking, (1, 2, 3))
    assert tree.best_partial(root, (1, 2, 3), before=1) == (whole, 2)
