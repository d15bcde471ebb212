"""Attention of many rows, where each program walks the whole past of some of them, one split after the other.
Arithmetic: `tiles`.
"""

import triton
import triton.language as tl

from kernels.triton.tiles import attend_tiles, lines_of, load_queries, merged, only_sinks, pages_of, store_rows


@triton.jit
def _sequence_of(tile: tl.tensor, starts: tl.tensor, sequences: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Sequence b has the tiles from starts[b] / TOKENS + b on: as many as it needs, or one more."""
    low, high = tile * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["table_stride", "sequences", "window"],
    do_not_specialize_on_alignment=["tables", "starts", "lengths"],
)
def attend_rows(
    q: tl.tensor,
    q_stride: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    sequences: tl.tensor,
    k_codes: tl.tensor,
    k_scales: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    k_channels: tl.tensor,
    v_channels: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    bend: tl.tensor,
    unit: tl.tensor,
    SHAPE: tl.constexpr,
    LINES: tl.constexpr,
) -> None:
    """Of sequences with more than one row. Grid: (tiles of rows, groups); the last tiles, which may have the longest
    past, come first."""
    TOKENS: tl.constexpr = LINES // SHAPE.together
    tile, group = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b = _sequence_of(tile, starts, sequences, TOKENS)
    begin, length = tl.load(starts + b), tl.load(lengths + b)
    rows = tl.load(starts + b + 1) - begin
    row = (tile - begin // TOKENS - b) * TOKENS
    if (rows > 1) & (row < rows):
        line_row, head, there, view, first_end, last_start = lines_of(
            row, rows, length - rows, group, window, SHAPE, LINES
        )
        seen_from, seen_to = view[2], view[3]
        queries = load_queries(q, q_stride, begin + line_row, head, there, k_channels, SHAPE)
        table = tables + b.to(tl.int64) * table_stride
        pages = pages_of(table, k_codes, k_scales, v_codes, v_scales, group, SHAPE)
        before = only_sinks(sinks, head, there, LINES, SHAPE)
        from_token = seen_from // SHAPE.tile * SHAPE.tile
        split, before = attend_tiles(
            from_token, seen_to, first_end, last_start, queries, before, view, pages, bend, unit, SHAPE, LINES, True
        )
        store_rows(out, begin + line_row, head, there, merged(before, split), v_channels, SHAPE)
