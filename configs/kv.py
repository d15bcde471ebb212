"""KV cache arithmetic: which bytes of a block belong to what. Pure; planner, pool, tiers and kernels all ask here.

    pool    uint8 [num_blocks, block_bytes]   one block: all layers, K and V, of `block_size` tokens, padded to 4 KiB
    layer   K: [kv_heads, head_dim / pair, block_size, pair]     V: [kv_heads, block_size / pair, head_dim, pair]
    4 bits  K: [kv_heads, head_dim / 2, block_size] bytes        V: [kv_heads, block_size, head_dim / 2] bytes
    rows    K and V: [kv_heads, block_size, head_dim], 4 bits: [kv_heads, block_size, head_dim / 2] bytes
    scales  [kv_heads, groups, block_size] float16, of K and of V, and as many zero points where the format has them

The second and third line are `KVOrder.PAIRED`, which CPUs read; GPUs read `KVOrder.ROWS`. `pair` is 2 for 16-bit
formats (dpbf16 and AMX multiply pairs: pairs of dims in K, pairs of tokens in V), else 1. Of four bits the first of two
dims lies low: in K dims 2i and 2i + 1, in V, inside a group of 32, dims j and j + 16 (so that sixteen bytes are two
vectors of neighbours). Codes and scales of a token lie in its block and nowhere else.

Layers that see different lengths of the past form groups, each with a pool of its own: `KVLayout`.
"""

import enum
from dataclasses import dataclass
from functools import cached_property

PAGE = 4096
"""Blocks are padded to a multiple of this: the unit of DMA and O_DIRECT."""
INT4_GROUP = 32
"""Numbers of a head that share a scale and a zero point in four bits."""


class KVFormat(enum.Enum):
    """How one number of the cache is stored. Formulas: `kernels.reference.kv_formats`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    """With a scale for each token and head."""
    FP8_E5M2 = "fp8_e5m2"
    """As it is, saturating."""
    INT8 = "int8"
    """With a scale for each token and head."""
    INT4 = "int4"
    """With a scale and a zero point for each token, head and `INT4_GROUP` numbers."""

    __hash__ = object.__hash__  # each member exists once; Enum's own hash is Python, and every kernel call asks for it

    @property
    def bits(self) -> int:
        return {KVFormat.FP32: 32, KVFormat.BF16: 16, KVFormat.FP16: 16, KVFormat.INT4: 4}.get(self, 8)

    @property
    def dtype(self) -> str:
        """torch's name of the numbers, or of the bytes that hold two."""
        return {
            KVFormat.FP32: "float32",
            KVFormat.BF16: "bfloat16",
            KVFormat.FP16: "float16",
            KVFormat.FP8_E4M3: "float8_e4m3fn",
            KVFormat.FP8_E5M2: "float8_e5m2",
            KVFormat.INT8: "int8",
            KVFormat.INT4: "uint8",
        }[self]

    @property
    def is_quantised(self) -> bool:
        return self.bits < 16

    @property
    def pair(self) -> int:
        """Neighbours side by side in `KVOrder.PAIRED`: dims in K, tokens in V."""
        return 2 if self.bits == 16 else 1

    @property
    def may_be_static(self) -> bool:
        """Whether scales that are fixed beforehand can take the place of its own."""
        return self in (KVFormat.FP8_E4M3, KVFormat.INT8)


class KVOrder(enum.Enum):
    """In which order the numbers of a block lie."""

    PAIRED = "paired"
    """As a CPU's instructions multiply them."""
    ROWS = "rows"
    """A token's numbers of a head side by side, as a GPU loads tiles, and as flash-attn reads pages."""

    @classmethod
    def of(cls, is_gpu: bool) -> "KVOrder":
        return cls.ROWS if is_gpu else cls.PAIRED


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer keeps of each token."""

    kv_heads: int
    head_dim: int
    format: KVFormat
    """Of K, and of V where `value_format` is None."""
    window: int | None = None
    """Tokens a row sees, itself included; None: all earlier ones."""
    value_format: KVFormat | None = None
    static: bool = False
    """Scales are fixed beforehand, for each head and dim, and do not lie in the block."""

    @cached_property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        """(of K, of V)"""
        return self.format, self.value_format or self.format

    def is_rotated(self, format: KVFormat) -> bool:
        """Whether a Hadamard rotation spreads a head's numbers before they become codes of `format`: one outlier would
        flatten the rest, with which it shares a scale."""
        return self.num_scales(format) > 0

    @property
    def fits_keys(self) -> bool:
        """Whether K is fitted at start (`engine.runner.key_fit`): where it has scales of its own."""
        return self.num_scales(self.formats[0]) > 0

    @property
    def fit_bytes(self) -> int:
        """What the fit takes, outside of all blocks: centre, channels and feedback of each head, fp32."""
        return 4 * self.kv_heads * self.head_dim * (self.head_dim + 2) if self.fits_keys else 0

    def num_scales(self, format: KVFormat) -> int:
        """Scales of a token and head that lie in the block."""
        if format is KVFormat.INT4:
            return self.head_dim // INT4_GROUP
        return int(format.may_be_static and not self.static)

    def bytes_per_token(self) -> int:
        """Codes, scales and zero points, K and V."""
        return sum(
            self.kv_heads
            * (self.head_dim * format.bits // 8 + self.num_scales(format) * (4 if format is KVFormat.INT4 else 2))
            for format in self.formats
        )


@dataclass(frozen=True)
class KVPart:
    """A run of bytes inside a block."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    """torch's name"""

    @property
    def nbytes(self) -> int:
        count = ITEMSIZE[self.dtype]
        for size in self.shape:
            count *= size
        return count


ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class KVHalf:
    """Where a layer's K, or its V, lies."""

    format: KVFormat
    codes: KVPart
    scales: KVPart | None = None
    zeros: KVPart | None = None

    @property
    def parts(self) -> tuple[KVPart, ...]:
        return tuple(part for part in (self.codes, self.scales, self.zeros) if part is not None)


@dataclass(frozen=True)
class KVSpec:
    """Layout of a block of one group's pool. `block_size` is in tokens and even."""

    layers: tuple[LayerKV, ...]
    block_size: int
    order: KVOrder = KVOrder.PAIRED

    def __post_init__(self) -> None:
        if self.block_size < 2 or self.block_size % 2:
            raise ValueError(f"block size must be even and at least 2, got {self.block_size}")
        for layer in self.layers:
            if layer.head_dim % 2:
                raise ValueError(f"head_dim must be even, got {layer.head_dim}")
            if KVFormat.INT4 in layer.formats and layer.head_dim % INT4_GROUP:
                raise ValueError(f"int4 needs a head_dim that {INT4_GROUP} divides, got {layer.head_dim}")
            if layer.static and not any(format.may_be_static for format in layer.formats):
                raise ValueError(f"{layer.formats[0].value}, {layer.formats[1].value} have no static scales")

    @cached_property
    def halves(self) -> tuple[tuple[KVHalf, KVHalf], ...]:
        """(K, V) of each layer, in layer order. Codes begin at multiples of 64 bytes, scales follow them."""
        found, offset = [], 0
        for layer in self.layers:
            k_format, v_format = layer.formats
            k = KVPart(_align(offset, 64), self._k_shape(layer, k_format), k_format.dtype)
            v = KVPart(_align(k.offset + k.nbytes, 64), self._v_shape(layer, v_format), v_format.dtype)
            offset = v.offset + v.nbytes
            halves = []
            for format, codes in ((k_format, k), (v_format, v)):
                scales: list[KVPart] = []
                if count := layer.num_scales(format):
                    for _ in range(2 if format is KVFormat.INT4 else 1):
                        scales.append(KVPart(offset, (layer.kv_heads, count, self.block_size), "float16"))
                        offset += scales[-1].nbytes
                halves.append(KVHalf(format, codes, *scales))
            found.append((halves[0], halves[1]))
        return tuple(found)

    def pair(self, format: KVFormat) -> int:
        """Neighbours stored side by side: dims in K, tokens in V."""
        return format.pair if self.order is KVOrder.PAIRED else 1

    def _k_shape(self, layer: LayerKV, format: KVFormat) -> tuple[int, ...]:
        if self.order is KVOrder.ROWS:
            return self._rows_shape(layer, format)
        if format is KVFormat.INT4:
            return layer.kv_heads, layer.head_dim // 2, self.block_size
        return layer.kv_heads, layer.head_dim // format.pair, self.block_size, format.pair

    def _v_shape(self, layer: LayerKV, format: KVFormat) -> tuple[int, ...]:
        if self.order is KVOrder.ROWS or format is KVFormat.INT4:
            return self._rows_shape(layer, format)
        return layer.kv_heads, self.block_size // format.pair, layer.head_dim, format.pair

    def _rows_shape(self, layer: LayerKV, format: KVFormat) -> tuple[int, ...]:
        width = layer.head_dim // 2 if format is KVFormat.INT4 else layer.head_dim
        return layer.kv_heads, self.block_size, width

    @cached_property
    def block_bytes(self) -> int:
        if not self.halves:
            return 0
        return _align(max(part.offset + part.nbytes for half in self.halves[-1] for part in half.parts), PAGE)

    @cached_property
    def bytes_per_token(self) -> int:
        """Payload of one token over all layers, padding excluded. Unquantised, with K like V:
        2 x layers x kv_heads x head_dim x bytes of a number."""
        return sum(layer.bytes_per_token() for layer in self.layers)

    def blocks_for_tokens(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


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
    def of(
        cls,
        layers: tuple[LayerKV, ...],
        block_size: int,
        max_model_len: int | None = None,
        order: KVOrder = KVOrder.PAIRED,
    ) -> "KVLayout":
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
            spec = KVSpec(tuple(layers[number] for number in numbers), block_size, order)
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
    def order(self) -> KVOrder:
        return self.groups[0].spec.order

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
