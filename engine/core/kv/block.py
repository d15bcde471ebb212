"""One page of the KV pool, and its place in the prefix tree."""

from typing import NamedTuple

NO_EXTENT = -1


class Block:
    """A page. In the tree when `parent` is set; then `tokens` names what it holds after all its ancestors' tokens.

        free     ref_count 0, not in the tree      on the free list
        cached   ref_count 0, in the tree          on the LRU list, evictable
        active   ref_count > 0                     in that many block tables

    A node with `block_size` tokens is full and may have children; one with fewer is open: the confirmed head of a page
    whose owner may still write behind those tokens. Open nodes are never shared, only copied.
    """

    __slots__ = (
        "children", "computed_in", "extents", "heads", "id", "last_use", "newer", "older", "parent", "ref_count",
        "stamp", "tokens",
    )  # fmt: skip

    def __init__(self, block_id: int, num_windows: int = 0) -> None:
        self.id = block_id
        self.extents = [NO_EXTENT] * num_windows
        """Where in each windowed group's pool lies what the block holds for it; `NO_EXTENT`: no longer there."""
        self.ref_count = 0
        """Block tables that hold it; a copy's source counts once more until its step is planned."""
        self.tokens: tuple[int, ...] = ()
        self.parent: Block | None = None
        self.children: dict[tuple[int, ...], Block] = {}
        """Full children by their exact tokens."""
        self.heads: dict[int, dict[Block, None]] = {}
        """All children, full and open, by their first token; oldest first."""
        self.stamp = 0
        """Changes each time the block enters the tree: (id, stamp) names a node for good."""
        self.computed_in = 0
        """Step whose forward pass writes the last of `tokens`."""
        self.last_use = 0
        """Step in which the block last went idle."""
        self.older: Block | None = None
        self.newer: Block | None = None
        """Neighbours on the LRU list."""

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.ref_count}, tokens={len(self.tokens)})"


class RootKey(NamedTuple):
    """What no two sequences may share across, each field in its own place: a salt never equals an adapter's name."""

    salt: str | None
    adapter: str | None


class Root(Block):
    """Stands above the first blocks of one (salt, adapter); no page of the pool."""

    __slots__ = ("key",)

    def __init__(self, key: RootKey) -> None:
        super().__init__(-1)
        self.key = key
