"""KV cache arithmetic: which bytes of a block belong to what. Pure; planner, pool, tiers and kernels all ask here.

    pool   uint8 [num_blocks, block_bytes]    one block: all layers, K and V, of `block_size` tokens, padded to 4 KiB
    layer  K: [kv_heads, head_dim / pair, block_size, pair]     V: [kv_heads, block_size / pair, head_dim, pair]

`pair` is 2 for 16-bit formats (dpbf16 and AMX multiply pairs: pairs of dims in K, pairs of tokens in V), 1 for fp32.
"""

import enum
from dataclasses import dataclass
from functools import cached_property

PAGE = 4096
"""Blocks are padded to a multiple of this: the unit of DMA and O_DIRECT."""


class KVFormat(enum.Enum):
    """How one number of the cache is stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def itemsize(self) -> int:
        return 4 if self is KVFormat.FP32 else 2

    @property
    def pair(self) -> int:
        """Neighbours stored side by side: dims in K, tokens in V."""
        return 1 if self is KVFormat.FP32 else 2


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer keeps of each token."""

    kv_heads: int
    head_dim: int
    format: KVFormat


@dataclass(frozen=True)
class KVPart:
    """A run of bytes inside a block."""

    offset: int
    shape: tuple[int, ...]
    format: KVFormat

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.format.itemsize


@dataclass(frozen=True)
class KVSpec:
    """Layout of a block. `block_size` is in tokens and even."""

    layers: tuple[LayerKV, ...]
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 2 or self.block_size % 2:
            raise ValueError(f"block size must be even and at least 2, got {self.block_size}")
        for layer in self.layers:
            if layer.head_dim % 2:
                raise ValueError(f"head_dim must be even, got {layer.head_dim}")

    @cached_property
    def parts(self) -> tuple[tuple[KVPart, KVPart], ...]:
        """(K, V) of each layer, in layer order, 64-byte aligned."""
        parts, offset = [], 0
        for layer in self.layers:
            pair = layer.format.pair
            k = KVPart(offset, (layer.kv_heads, layer.head_dim // pair, self.block_size, pair), layer.format)
            offset = _align(offset + k.nbytes, 64)
            v = KVPart(offset, (layer.kv_heads, self.block_size // pair, layer.head_dim, pair), layer.format)
            offset = _align(offset + v.nbytes, 64)
            parts.append((k, v))
        return tuple(parts)

    @cached_property
    def block_bytes(self) -> int:
        _, last = self.parts[-1]
        return _align(last.offset + last.nbytes, PAGE)

    @cached_property
    def bytes_per_token(self) -> int:
        """Payload of one token over all layers, padding excluded: 2 x layers x kv_heads x head_dim x itemsize."""
        return sum(2 * layer.kv_heads * layer.head_dim * layer.format.itemsize for layer in self.layers)

    def blocks_for_tokens(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def blocks_for_bytes(self, size: int) -> int:
        return size // self.block_bytes


def _align(value: int, to: int) -> int:
    return -(-value // to) * to
