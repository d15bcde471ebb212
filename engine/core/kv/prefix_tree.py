"""What the pool holds, by exact tokens: a tree of blocks below one root for each (salt, adapter).

Children are looked up in dictionaries keyed by their tokens. A dictionary hashes its keys but decides by comparing
them: equal hashes never make two prefixes one.
"""

from collections.abc import Sequence
from itertools import islice

from engine.core.kv.block import NO_EXTENT, Block, Root, RootKey

MAX_EXAMINED = 32
"""Children looked at for the best partial match, newest first."""


class PrefixTree:
    """Nodes are blocks. Full children of one parent are unique; open ones may repeat."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[RootKey, Root] = {}
        self._stamp = 0

    @property
    def roots(self) -> dict[RootKey, Root]:
        return self._roots

    def root(self, key: RootKey) -> Root:
        """The root of `key`, made when it is missing. It goes with its last child."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key)
        return root

    def walk(self, parent: Block, tokens: Sequence[int], start: int, limit: int) -> list[Block]:
        """Full blocks below `parent` that hold tokens[start:], in order, not beyond tokens[:limit]."""
        size, path = self.block_size, []
        while parent.children and start + size <= limit:
            child = parent.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            parent, start = child, start + size
        return path

    def best_partial(self, parent: Block, tokens: Sequence[int], before: int) -> tuple[Block | None, int]:
        """The child of `parent` with the longest head equal to the head of `tokens`, and that length.

        `before`: only children computed by steps earlier than this one, and only those that lack no extent.
        """
        best, best_length = None, 0
        candidates = parent.heads.get(tokens[0]) if tokens else None
        for child in islice(reversed(candidates), MAX_EXAMINED) if candidates else ():
            if child.computed_in < before and NO_EXTENT not in child.extents:
                length = _common_head(child.tokens, tokens)
                if length > best_length:
                    best, best_length = child, length
                    if length == len(tokens):
                        break
        return best, best_length

    def insert(self, parent: Block, block: Block, tokens: tuple[int, ...]) -> None:
        """Makes `block` a child of `parent`: full or open by the number of `tokens`, at least one."""
        assert block.parent is None and 0 < len(tokens) <= self.block_size, (block, tokens)
        self._stamp += 1
        block.parent, block.tokens, block.stamp = parent, tokens, self._stamp
        parent.heads.setdefault(tokens[0], {})[block] = None
        if len(tokens) == self.block_size:
            assert tokens not in parent.children, "full children of one parent are unique"
            parent.children[tokens] = block

    def remove(self, block: Block) -> None:
        """Takes a leaf out."""
        assert not block.heads, f"{block} has children"
        parent = block.parent
        assert parent is not None
        same_head = parent.heads[block.tokens[0]]
        del same_head[block]
        if not same_head:
            del parent.heads[block.tokens[0]]
        if len(block.tokens) == self.block_size:
            del parent.children[block.tokens]
        block.parent, block.tokens = None, ()
        if isinstance(parent, Root) and not parent.heads:
            del self._roots[parent.key]

    def replace(self, old: Block, new: Block) -> None:
        """`new`, which holds the same tokens, takes the place of `old` with all its children."""
        parent, tokens = old.parent, old.tokens
        assert parent is not None
        new.children, new.heads, old.children, old.heads = old.children, old.heads, {}, {}
        for children in new.heads.values():
            for child in children:
                child.parent = new
        del parent.heads[tokens[0]][old], parent.children[tokens]
        old.parent, old.tokens = None, ()
        self.insert(parent, new, tokens)

    def check(self) -> int:
        """Asserts that both indexes of every node agree, that open nodes are leaves, that no root is empty.

        Returns the number of nodes, roots apart.
        """
        num_nodes = 0
        queue: list[Block] = list(self._roots.values())
        for key, root in self._roots.items():
            assert root.key == key and root.heads, f"root {key} is empty"
        while queue:
            parent = queue.pop()
            below = [(first, child) for first, same_head in parent.heads.items() for child in same_head]
            assert all(same_head for same_head in parent.heads.values())
            full = [child for _, child in below if len(child.tokens) == self.block_size]
            assert {child.tokens: child for child in full} == parent.children and len(full) == len(parent.children)
            for first, child in below:
                assert child.parent is parent and child.tokens[0] == first, child
                assert len(child.tokens) == self.block_size or not child.heads, f"{child} is open and has children"
            queue += [child for _, child in below]
            num_nodes += len(below)
        return num_nodes


def _common_head(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
