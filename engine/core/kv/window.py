"""Pages of the layers with a sliding window: one pool for each distinct window.

A block is a page's place in tables and tree. For the layers of a windowed group its contents lie in an extent of that
group's pool, and only for as long as somebody may read them: a sequence holds the extents of the blocks that its rows
to come can see, always the tail of its table, and gives up the others while it goes on.

    free      hangs on no block
    cached    hangs on a block of the tree, held by nobody: evictable, without its block
    active    held by that many tables

So a block may lack its extent. A prefix can be reused as far as the rows behind it find all that they can see.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from configs.kv import WindowPages
from engine.core.kv.block import NO_EXTENT, Block
from engine.request import Request

Table = tuple[list[int], list[int]]
"""Block ids; for each windowed group, the index of the first block whose extent is held."""


class WindowPool:
    """The extents of one windowed group. Every verb is O(1), or O(blocks) where it takes several."""

    def __init__(self, place: int, pages: WindowPages, block_size: int) -> None:
        """`place`: the group's index in `Block.extents` and `Request.window_starts`."""
        assert pages.num_pages > 0 and pages.window > 0, pages
        self.window, self.max_held, self.num_extents = pages.window, pages.max_held, pages.num_pages
        self.usable_tokens = pages.usable_tokens(block_size)
        """The longest sequence alone in the pool; None: of any length."""
        self._place, self._block_size = place, block_size
        self._owners: list[Block | None] = [None] * pages.num_pages
        self._ref_counts = [0] * pages.num_pages
        self.free = list(range(pages.num_pages))[::-1]
        """Extents that hang on no block."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Longest idle first."""

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Free or evictable."""
        return len(self.free) + len(self._cached)

    @property
    def num_active(self) -> int:
        return self.num_extents - self.num_available

    # ---------------------------------------------------------------- extents
    def take(self, block: Block) -> int:
        """Gives a new block its extent, with one reference: a free one, else that of the block longest idle."""
        if self.free:
            extent = self.free.pop()
        else:
            extent, _ = self._cached.popitem(last=False)
            loser = self._owners[extent]
            assert loser is not None
            loser.extents[self._place] = NO_EXTENT
        assert block.extents[self._place] == NO_EXTENT, block
        self._owners[extent], self._ref_counts[extent], block.extents[self._place] = block, 1, extent
        return extent

    def acquire(self, block: Block) -> None:
        extent = block.extents[self._place]
        assert extent != NO_EXTENT, block
        if self._ref_counts[extent] == 0:
            del self._cached[extent]
        self._ref_counts[extent] += 1

    def release(self, block: Block) -> None:
        """The last reference makes the extent cached if the block is in the tree, free if not."""
        extent = block.extents[self._place]
        self._ref_counts[extent] -= 1
        if self._ref_counts[extent] == 0:
            if block.parent is None:
                self._detach(block)
            else:
                self._cached[extent] = None

    def forget(self, block: Block) -> None:
        """The block has left the tree: nobody can find an extent that no table holds."""
        extent = block.extents[self._place]
        if extent != NO_EXTENT and self._ref_counts[extent] == 0:
            del self._cached[extent]
            self._detach(block)

    def inherit(self, old: Block, new: Block) -> None:
        """`new` has taken the place of `old`, its idle double: it takes the extent too if it has none left."""
        extent = old.extents[self._place]
        if extent == NO_EXTENT:
            return
        if new.extents[self._place] == NO_EXTENT:
            self._owners[extent], new.extents[self._place], old.extents[self._place] = new, extent, NO_EXTENT
        else:
            self.forget(old)

    # ---------------------------------------------------------------- what rows see
    def first(self, num_tokens: int) -> int:
        """Index of the first block that a row at position `num_tokens`, and so any later one, can see."""
        return max(0, num_tokens - self.window + 1) // self._block_size

    def longest(self, blocks: Sequence[Block], num_tokens: int) -> int:
        """Most of the first `num_tokens` tokens of `blocks` behind which a row finds every extent that it can see."""
        while num_tokens:
            seen = range(self.first(num_tokens), -(-num_tokens // self._block_size))
            missing = next((index for index in seen if blocks[index].extents[self._place] == NO_EXTENT), None)
            if missing is None:
                break
            num_tokens = missing * self._block_size  # nothing longer does without that one
        return num_tokens

    # ---------------------------------------------------------------- sequences
    def has_room(self, request: Request, count: int) -> bool:
        """Whether `count` more extents can be had, and be held beside the others until rows are confirmed."""
        held = len(request.block_ids) - request.window_starts[self._place]
        return count <= self.num_available and held + count <= self.max_held

    def claim(self, footprint: int, start: int) -> int:
        """Most extents held at once by a sequence that has `footprint` blocks in the end, and sees those from `start`
        on."""
        return min(footprint - start, self.max_held)

    def outstanding(self, request: Request, blocks: Sequence[Block], footprint: int) -> int:
        """What the pool may yet have to give for a prompt under way.

        What others hold as well does not count as its own: as their windows move on, sequences that share part.
        """
        start, place, counts = request.window_starts[self._place], self._place, self._ref_counts
        own = sum(counts[blocks[block_id].extents[place]] == 1 for block_id in request.block_ids[start:])
        return self.claim(footprint, start) - own

    def slide(self, request: Request, blocks: Sequence[Block]) -> bool:
        """Gives up what no row to come can see: those have positions from `num_confirmed` on. True if there was any."""
        start, end = request.window_starts[self._place], self.first(request.num_confirmed)
        if end == start:
            return False
        self.release_all(blocks[block_id] for block_id in reversed(request.block_ids[start:end]))
        request.window_starts[self._place] = end
        return True

    def exchange(self, request: Request, blocks: Sequence[Block], path: Sequence[Block], num_tokens: int) -> None:
        """The sequence goes on at `num_tokens`, behind `path`, which takes the place of its unpublished blocks."""
        published, place = request.num_published, self._place
        start = self.first(num_tokens)
        self.acquire_all(path[max(0, start - published) :])
        kept = range(start, published)
        held = range(request.window_starts[place], len(request.block_ids))
        self.release_all(blocks[request.block_ids[index]] for index in reversed(held) if index not in kept)
        request.window_starts[place] = start

    def acquire_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.acquire(block)

    def release_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.release(block)

    # ---------------------------------------------------------------- invariants
    def check(self, blocks: Sequence[Block], tables: Iterable[Table]) -> None:
        """Asserts that owners, references and lists agree. `tables`: all there are."""
        held = Counter(
            blocks[block_id].extents[self._place] for ids, starts in tables for block_id in ids[starts[self._place] :]
        )
        assert NO_EXTENT not in held, "a table needs an extent that is not there"
        owned = {block.extents[self._place]: block for block in blocks if block.extents[self._place] != NO_EXTENT}
        assert len(owned) + len(self.free) == len(set(self.free) | owned.keys()) == self.num_extents
        for extent, owner in enumerate(self._owners):
            assert owner is owned.get(extent) and self._ref_counts[extent] == held[extent], (extent, owner)
            idle = owner is not None and held[extent] == 0
            assert (extent in self._cached) == idle, (extent, owner)
            assert not idle or (owner is not None and owner.parent is not None), f"{owner} cannot be found"

    def _detach(self, block: Block) -> None:
        extent = block.extents[self._place]
        self._owners[extent], block.extents[self._place] = None, NO_EXTENT
        self.free.append(extent)
