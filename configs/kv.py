"""KV cache arithmetic: which bytes of a block belong to what. Pure; planner, pool, tiers and kernels all ask here.

    pool   uint8 [num_blocks, block_bytes]    one block: all layers, K and V, of `block_size` tokens, padded to 4 KiB
    layer  K: [kv_heads, head_dim / pair, block_size, pair]     V: [kv_heads, block_size / pair, head_dim, pair]

`pair` is 2 for 16-bit formats (dpbf16 and AMX multiply pairs: pairs of dims in K, pairs of tokens in V), 1 for fp32.

Layers that see different lengths of the past form groups, each with a pool of its own: `KVLayout`.
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
    window: int | None = None
    """Tokens a row sees, itself included; None: all earlier ones."""


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
    """Layout of a block of one group's pool. `block_size` is in tokens and even."""

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
        if not self.parts:
            return 0
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


@dataclass(frozen=True)
class KVGroup:
    """Layers that need the same tokens kept, and the layout of the blocks in which those are."""

    window: int | None
    layers: tuple[int, ...]
    """Numbers of the model's layers, in the order of `spec.layers`."""
    spec: KVSpec


@dataclass(frozen=True)
class KVLayout:
    """All layers of a model, in groups.

    Group 0 keeps whole contexts. It is always there: if every layer has a window its blocks have no bytes, and stand in
    tables and prefix tree as the pages' names alone. One more group follows for each distinct window.
    """

    groups: tuple[KVGroup, ...]

    @classmethod
    def of(cls, layers: tuple[LayerKV, ...], block_size: int, max_model_len: int | None = None) -> "KVLayout":
        """`layers`: all of the model's, in order. A window that no sequence of `max_model_len` tokens fills is none."""
        own = [
            None if layer.window is None or layer.window >= (max_model_len or layer.window + 1) else layer.window
            for layer in layers
        ]
        windows: list[int | None] = [None]
        windows += sorted({window for window in own if window is not None})
        groups = []
        for window in windows:
            numbers = tuple(number for number, its_window in enumerate(own) if its_window == window)
            spec = KVSpec(tuple(layers[number] for number in numbers), block_size)
            groups.append(KVGroup(window, numbers, spec))
        return cls(tuple(groups))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each of the model's layers: its group's number, and its index in that group's spec."""
        found = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(found)))

    def place(self, layer: int) -> tuple[int, int]:
        return self.places[layer]

    @property
    def block_size(self) -> int:
        return self.groups[0].spec.block_size

    @property
    def num_layers(self) -> int:
        return len(self.places)

    @property
    def block_bytes(self) -> int:
        """One page in every group."""
        return sum(group.spec.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Payload of one token that every layer still keeps."""
        return sum(group.spec.bytes_per_token for group in self.groups)


@dataclass(frozen=True)
class WindowPages:
    """A windowed group's pool, as far as the KV manager needs to know it."""

    window: int
    """Tokens."""
    num_pages: int
    max_held: int
    """Pages that a sequence may hold at once: its window, the tokens of a step, and one page for generation."""

    @classmethod
    def plan(cls, window: int, num_pages: int, block_size: int, step_tokens: int) -> "WindowPages":
        """`step_tokens`: most tokens of one sequence in a step."""
        return cls(window, num_pages, -(-(window + step_tokens) // block_size) + 2)

    def usable_tokens(self, block_size: int) -> int | None:
        """The longest sequence alone in the pool; None: of any length, since what it may hold at once fits."""
        return None if self.num_pages >= self.max_held else self.num_pages * block_size


def _align(value: int, to: int) -> int:
    return -(-value // to) * to
