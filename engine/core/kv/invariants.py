"""What must hold of pools, tree and tables between two steps. O(blocks + tokens): for idle moments and tests."""

from collections import Counter
from collections.abc import Collection, Sequence

from engine.core.kv.block import Block, RootKey
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_tree import PrefixTree
from engine.core.kv.window import Table, WindowPool
from engine.request import Request


def check_tables(
    pool: BlockPool,
    windows: Sequence[WindowPool],
    tree: PrefixTree,
    requests: Collection[Request],
    leaving: Sequence[Table],
) -> None:
    """Asserts that references count the tables that hold a page, and that every table and node says what it holds.

    `leaving`: tables of sequences that are gone, kept until a step is done.
    """
    tables = [*leaving, *((request.block_ids, request.window_starts) for request in requests)]
    references = Counter(block_id for block_ids, _ in tables for block_id in block_ids)
    for block in pool.blocks:
        assert block.ref_count == references[block.id], (block, references[block.id])
    pool.check()
    for window in windows:
        window.check(pool.blocks, tables)
    assert tree.check() == sum(block.parent is not None for block in pool.blocks)
    for request in requests:
        _check_table(request, pool.blocks, tree)
        assert request.window_starts == [window.first(request.num_confirmed) for window in windows], request.request_id


def _check_table(request: Request, blocks: Sequence[Block], tree: PrefixTree) -> None:
    size, ids, tokens = tree.block_size, request.block_ids, request.token_ids
    assert len(set(ids)) == len(ids), f"{request.request_id}: a block stands twice in one table"
    assert len(ids) * size >= request.num_computed >= request.num_published * size
    if request.num_refreshed:
        others = [block_id for block_id in ids if blocks[block_id].ref_count > 1 or blocks[block_id].parent is not None]
        assert not others, f"{request.request_id} was refreshed and is not alone with {others}"
    parent: Block | None = tree.roots.get(RootKey(request.salt, request.adapter))
    for index, block_id in enumerate(ids):
        block = blocks[block_id]
        held = tokens[index * size : (index + 1) * size]
        if index < request.num_published:
            assert block.tokens == tuple(held) and block.parent is parent, (request.request_id, index)
        elif block.parent is not None:  # the open tail: only what has been written
            assert index == request.num_published and block.parent is parent, (request.request_id, index)
            assert list(block.tokens) == held[: min(len(block.tokens), request.num_computed - index * size)]
        if block.ref_count > 1:
            assert index < request.num_published, f"{request.request_id} would write block {block_id}, which is shared"
        parent = block
