"""Paged attention: which kernel computes which rows. Contract: `kernels.ops`; arithmetic: `kernels.triton.tiles`.

Nothing here waits for the device: grids come from shapes. What they do not tell, kernels find in `query_start` and
`seq_lens`. All rows go to `decode` where there are as many as sequences, as in a step that only decodes, or so few that
`prefill` could not occupy a GPU, if it has room for all of them at a time. Else `decode` takes the sequences with one
row, and `prefill` the others. A row's bits are the same either way.
"""

import functools
import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

from configs.kv import KVFormat, KVHalf, KVOrder, LayerKV
from kernels.ops import LayerPages, compute_dtype
from kernels.triton.decode import attend_splits, merge_splits
from kernels.triton.device import DTYPES, shared_bytes_of
from kernels.triton.prefill import attend_rows
from kernels.triton.rotation import rotated_queries, unrotated

NO_WINDOW = 2**31 - 1
"""Tokens: no sequence has more, its length being an int32."""
SPLIT = 512
"""Tokens whose sums are made apart from those of others."""
TOGETHER = 32
"""Heads that read the same key/value head and go together, at most."""
PREFILL_HEADS = 2**14
"""Rows x heads x sequences from which on `prefill` occupies a GPU: `decode` has programs for each sequence as if all
rows were its own."""
PROGRAMS = 2**11
"""Of `decode`, and a few more. Long sequences have a share of them each, in which splits take turns."""
STATES = 2**25
"""Numbers of partial results that `decode` has at a time: `configs.pool.STATES_BYTES`."""
MERGED = 1024
"""Numbers of outputs that a program merges at a time."""


@dataclass(frozen=True, eq=False)
class Half:
    """K or V, as kernels see it. Counted in numbers of the format, or in bytes where those hold two of four bits."""

    format: str
    bits: int
    """Of a number, or of two of four bits."""
    row: int
    """Of one token and head."""
    width: int
    """A power of two that holds a row."""
    block: int
    """From a block to the next."""
    scales: int
    """Of a token and head, each followed by those of the page's other tokens; 0: none."""
    zeros: int
    """Of four bits: from a scale to its zero point, in words of 16 bits."""

    @property
    def is_scaled(self) -> bool:
        """One scale a token and head, left to scores and weights."""
        return self.scales > 0 and self.format != KVFormat.INT4.value


@dataclass(frozen=True, eq=False)
class Shape:
    """What kernels of a layer are compiled for. Known by itself, not by its fields: each launch asks for its hash."""

    heads: int
    dims: int
    width: int
    """A power of two that holds a head's dims."""
    group: int
    """Heads that read the same key/value head."""
    together: int
    """Of these, how many share a tile's lines."""
    parts: int
    """Tiles that a group needs for that."""
    groups: int
    """Key/value heads x parts."""
    page: int
    """Tokens of a block."""
    words: int
    """Words of 16 bits in a block."""
    number: tl.dtype
    """What `tl.dot` multiplies."""
    tile: int
    """Tokens."""
    split: int
    """Tokens: so many tiles."""
    k: Half
    v: Half
    is_windowed: bool
    is_capped: bool


@functools.cache
def shape_of(
    kind: LayerKV, page: int, block_bytes: int, heads: int, dtype: torch.dtype, is_windowed: bool, is_capped: bool
) -> Shape:
    """dtype: of queries."""
    group, width = heads // kind.kv_heads, max(16, triton.next_power_of_2(kind.head_dim))
    together = min(group, TOGETHER)
    parts = -(-group // together)
    number = number_of(dtype, kind)
    tile = 64 if number.itemsize == 2 and width <= 128 else 32
    k, v = (_half(kind, format, page, block_bytes, width) for format in kind.formats)
    return Shape(
        heads, kind.head_dim, width, group, together, parts, kind.kv_heads * parts, page, block_bytes // 2,
        DTYPES[number], tile, SPLIT, k, v, is_windowed, is_capped,
    )  # fmt: skip


def number_of(dtype: torch.dtype, kind: LayerKV) -> torch.dtype:
    """In which products are computed: as `compute_dtype` says, but in fp16 where queries and pages are that."""
    if dtype is torch.float16 and all(format is KVFormat.FP16 for format in kind.formats):
        return dtype
    return compute_dtype(dtype, kind.formats)


def _half(kind: LayerKV, format: KVFormat, page: int, block_bytes: int, width: int) -> Half:
    halved = 2 if format is KVFormat.INT4 else 1
    scales = kind.num_scales(format)
    bits, zeros = max(8, format.bits), kind.kv_heads * scales * page
    block = block_bytes * 8 // bits
    return Half(format.value, bits, kind.head_dim // halved, width // halved, block, scales, zeros)


@dataclass(frozen=True)
class Launch:
    """How many lines a tile has, how many warps share it, and Triton's number of stages: with 5, K and V of two tiles
    are on their way while one is computed, with 3 of one, with 1 of none."""

    lines: int
    warps: int
    stages: int

    def shared_bytes(self, shape: Shape) -> int:
        """Of a program: queries (of fp32 what its products leave too), tiles as they are stored, and as operands."""
        item = int(shape.number.primitive_bitwidth) // 8
        stored = sum(shape.tile * half.width * half.bits // 8 for half in (shape.k, shape.v))
        made = sum(shape.tile * shape.width * item for half in (shape.k, shape.v) if half.bits != 8 * item)
        queries = self.lines * shape.width * item * (2 if item == 4 else 1)
        return queries + (self.stages + 1) // 2 * stored + made + 1024


DECODE = Launch(64, 4, 5), Launch(64, 4, 3), Launch(64, 4, 1)
PREFILL = Launch(128, 8, 5), Launch(128, 8, 3), Launch(64, 4, 3), Launch(64, 4, 1)
"""Best first. A row's sums are made in the same order in all of them: each warp has 16 lines."""


@functools.cache
def launch_of(shape: Shape, among: tuple[Launch, ...], device: torch.device) -> Launch:
    """The best for which a program has enough memory."""
    room = shared_bytes_of(device)
    return next((each for each in among if each.shared_bytes(shape) <= room), among[-1])


@dataclass(frozen=True)
class Call:
    """What all kernels of a call get."""

    queries: tuple[torch.Tensor, int, torch.Tensor, int, torch.Tensor, torch.Tensor]
    """q, its row stride, block_tables, its row stride, query_start, seq_lens"""
    begins: tuple[torch.Tensor, ...]
    """Where in the pool codes and scales of K, and of V, begin."""
    k_channels: torch.Tensor | None
    v_channels: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    """[T, heads, dims]"""
    window: int
    bend: float
    """tanh(q . k x bend) is a score where scores are capped."""
    unit: float
    """By what a score is multiplied, to be an exponent of 2."""
    shape: Shape

    @property
    def rows(self) -> int:
        return self.out.shape[0]

    @property
    def sequences(self) -> int:
        return self.queries[-1].shape[0]

    @property
    def splits(self) -> int:
        """Of the longest sequence that the tables have room for."""
        return max(1, -(-self.queries[2].shape[1] * self.shape.page // SPLIT))

    @property
    def state_size(self) -> int:
        """Numbers of a row's partial results."""
        return self.shape.heads * self.splits * (self.shape.dims + 2)

    def compute(self) -> None:
        seems_to_decode = self.rows == self.sequences
        is_small = self.rows * self.shape.heads * self.sequences <= PREFILL_HEADS
        has_room = self.rows == 1 or self.rows * self.state_size <= STATES
        if has_room and (seems_to_decode or is_small):
            self.by_splits(alone=False)
            return
        if self.sequences > 1:
            self.by_splits(alone=True)
        self.by_rows()

    def by_splits(self, alone: bool) -> None:
        """alone: rows of sequences that have one and no more, as many at a time as `STATES` has room for; else all."""
        shape, launch = self.shape, launch_of(self.shape, DECODE, self.out.device)
        splits, size = self.splits, self.state_size
        count = self.sequences if alone else self.rows
        places = min(count, max(1, STATES // size)) if alone else count
        states = torch.empty(places * size, dtype=torch.float32, device=self.out.device)
        longest = 1 if alone else max(1, self.rows - self.sequences + 1)  # if no sequence has no row
        for first in range(0, count, places):
            sequences = min(places, count - first) if alone else self.sequences
            shared = min(splits, max(1, PROGRAMS // (sequences * shape.groups)))
            at = first, min(places, count - first), splits, shape
            attend_splits[sequences * shape.groups, shared, triton.cdiv(longest, launch.lines // shape.together)](
                *self.queries, *self.begins, self.k_channels, self.window, self.bend, self.unit, states, *at,
                launch.lines, alone, num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=False,
            )  # fmt: skip
            lines = max(1, MERGED // shape.width)
            merge_splits[sequences, triton.cdiv(longest * shape.heads, lines)](
                states, *self.queries[-2:], self.v_channels, self.sinks, self.out, self.window, *at,
                lines, alone, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip

    def by_rows(self) -> None:
        """Of sequences with more than one row."""
        shape, launch = self.shape, launch_of(self.shape, PREFILL, self.out.device)
        tiles = self.rows // (launch.lines // shape.together) + self.sequences
        attend_rows[tiles, shape.groups](
            *self.queries, self.sequences, *self.begins, self.k_channels, self.v_channels, self.sinks, self.out,
            self.window, self.bend, self.unit, shape, launch.lines,
            num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=False,
        )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    pages: LayerPages,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A row without tokens, its sequence being 0 long, gets zeros; rows of no sequence are undefined."""
    assert pages.spec.order is KVOrder.ROWS, pages.spec.order
    kind, spec, (rows, heads, _) = pages.kind, pages.spec, q.shape
    flags = window is not None, softcap is not None
    shape = shape_of(kind, spec.block_size, spec.block_bytes, heads, q.dtype, *flags)
    k_channels, v_channels = (transform.channels for transform in pages.transforms)
    k_turned, v_turned = (kind.is_rotated(format) for format in kind.formats)
    out = torch.empty(q.shape, dtype=torch.float32 if v_turned else q.dtype, device=q.device)
    if rows == 0:
        return out.to(q.dtype).flatten(1)
    dtype = q.dtype
    if k_turned:
        q, k_channels = rotated_queries(q, k_channels, number_of(dtype, kind)), None
    call = Call(
        (q, q.stride(0), block_tables, block_tables.stride(0), query_start, seq_lens),
        begins_of(pages),
        k_channels,
        v_channels,
        sinks,
        out,
        NO_WINDOW if window is None else window,
        scale / (softcap or 1.0),
        (softcap or scale) * math.log2(math.e),
        shape,
    )
    call.compute()
    return (unrotated(out, dtype) if v_turned else out).flatten(1)


_begins: WeakKeyDictionary[LayerPages, tuple[torch.Tensor, ...]] = WeakKeyDictionary()


def begins_of(pages: LayerPages) -> tuple[torch.Tensor, ...]:
    """Views of the pool from where codes and scales of K, and of V, begin in block 0; any view where there are none.
    Made once for each layer."""
    found = _begins.get(pages)
    if found is None:
        found = _begins[pages] = tuple(view for half in pages.halves for view in _begin_of(half, pages.pool.view(-1)))
    return found


def _begin_of(half: KVHalf, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    plain = None if half.format.is_quantised else getattr(torch, half.codes.dtype)
    scales = pool[half.scales.offset if half.scales else 0 :]
    return pool[half.codes.offset :].view(plain or torch.uint8), scales.view(torch.float16)
