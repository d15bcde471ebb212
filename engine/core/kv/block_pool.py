"""Which blocks are free, cached or active: every verb is O(1)."""

from sys import maxsize

from engine.core.kv.block import Block


class BlockPool:
    """A free list, and a doubly linked list of cached blocks through the blocks themselves, longest idle first.

    A sequence releases its blocks last one first, so a node always stands behind its children on the LRU list: the
    head is a leaf, and eviction never searches.
    """

    def __init__(self, num_blocks: int, num_windows: int = 0) -> None:
        """`num_windows`: windowed groups, for which a block may have extents (`kv/window.py`)."""
        assert num_blocks > 0, num_blocks
        self.blocks = [Block(block_id, num_windows) for block_id in range(num_blocks)]
        self.now = 0
        """The current step, for `Block.last_use`."""
        self.num_cached = 0
        self.num_shared = 0
        """Blocks with two or more references."""
        self._free = self.blocks[::-1]
        self._ends = Block(-1)
        """Sentinel: `newer` is the head of the LRU list, `older` its tail."""
        self._ends.newer = self._ends.older = self._ends

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return len(self.blocks) - len(self._free) - self.num_cached

    @property
    def num_available(self) -> int:
        """Free or evictable."""
        return len(self._free) + self.num_cached

    @property
    def oldest(self) -> Block | None:
        """The next block to evict."""
        return self._ends.newer if self.num_cached else None

    def take(self) -> Block:
        """A free block, with one reference. There must be one."""
        block = self._free.pop()
        block.ref_count = 1
        return block

    def acquire(self, block: Block) -> None:
        """One more reference to a block of the tree."""
        if block.ref_count == 0:
            self._unlink(block)
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one makes the block cached if it is in the tree, free if not."""
        assert block.ref_count > 0, block
        block.ref_count -= 1
        if block.ref_count == 1:
            self.num_shared -= 1
        elif block.ref_count == 0:
            block.last_use = self.now
            if block.parent is None:
                self._free.append(block)
            else:
                self._link_newest(block)

    def discard(self, block: Block) -> None:
        """A cached block that has left the tree becomes free."""
        assert block.ref_count == 0 and block.parent is None, block
        self._unlink(block)
        self._free.append(block)

    def check(self) -> None:
        """Asserts that each block is exactly one of free, cached and active, and that the LRU list is leaf first."""
        free = {block.id for block in self._free}
        assert len(free) == len(self._free), "a block is free twice"
        place: dict[Block, int] = {}
        block = self._ends.newer
        while block is not None and block is not self._ends:
            place[block] = len(place)
            block = block.newer
        assert len(place) == self.num_cached
        for block in self.blocks:
            assert (block.id in free) == (block.ref_count == 0 and block.parent is None), block
            assert (block in place) == (block.ref_count == 0 and block.parent is not None), block
            for child in (child for same_head in block.heads.values() for child in same_head):
                if block in place:
                    assert place.get(child, maxsize) < place[block], f"{block} would be evicted before {child}"
        assert self.num_shared == sum(block.ref_count > 1 for block in self.blocks)

    def _link_newest(self, block: Block) -> None:
        tail = self._ends.older
        assert tail is not None
        block.older, block.newer = tail, self._ends
        tail.newer = self._ends.older = block
        self.num_cached += 1

    def _unlink(self, block: Block) -> None:
        older, newer = block.older, block.newer
        assert older is not None and newer is not None, f"{block} is not on the LRU list"
        older.newer, newer.older = newer, older
        block.older = block.newer = None
        self.num_cached -= 1
