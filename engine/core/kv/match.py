"""What a prompt finds in the cache."""

from dataclasses import dataclass, field

from engine.core.kv.block import Block


@dataclass(slots=True)
class Match:
    """What the tree has of a sequence's tokens. Valid until anything else is asked of the manager."""

    blocks: list[Block] = field(default_factory=list)
    """To be shared whole."""
    source: Block | None = None
    """To be copied, for its first `head` tokens."""
    head: int = 0
    num_tokens: int = 0
    """All in all."""
    lacks_extents: bool = False
    """More is known, but not all of it that the next row would see."""
