"""Attention of rows whose past is shared out between programs: each leaves the states of some splits, and a second
kernel merges those of a row in order. For few rows with a long past, as decoding has. Arithmetic: `tiles`.
"""

import triton
import triton.language as tl

from kernels.triton.tiles import (
    NOTHING,
    attend_tiles,
    lines_of,
    load_queries,
    merged,
    no_tokens,
    only_sinks,
    pages_of,
    store_rows,
)


@triton.jit
def _rows_of(
    number: tl.tensor, starts: tl.tensor, lengths: tl.tensor, first: tl.tensor, places: tl.tensor, ALONE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """A launch has `places` for states. ALONE: sequences have one each, from sequence `first` on, and what they compute
    is their row if they have one and no more. Else rows have one each, from row `first` on.

    -> of the launch's sequence `number`: its number among all, its first row, its tokens before that, the place of its
    row 0, and which rows [low, high) of it are computed."""
    b = number
    if ALONE:
        b = first + number
    begin, length = tl.load(starts + b), tl.load(lengths + b)
    rows = tl.load(starts + b + 1) - begin
    if ALONE:
        place = number
        low, high = number * 0, tl.where(rows == 1, 1, 0)
    else:
        place = begin - first
        low, high = tl.maximum(-place, 0), tl.minimum(rows, places - place)
    return b, begin, length - rows, place, low, high


@triton.jit(
    do_not_specialize=["table_stride", "window", "first", "places", "splits"],
    do_not_specialize_on_alignment=["tables", "starts", "lengths"],
)
def attend_splits(
    q: tl.tensor,
    q_stride: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    k_codes: tl.tensor,
    k_scales: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    k_channels: tl.tensor,
    window: tl.tensor,
    bend: tl.tensor,
    unit: tl.tensor,
    states: tl.tensor,
    first: tl.tensor,
    places: tl.tensor,
    splits: tl.tensor,
    SHAPE: tl.constexpr,
    LINES: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """Grid: (sequences x groups, programs that share splits, programs that share rows). states: see `_states_at`."""
    group = tl.program_id(0) % SHAPE.groups
    b, begin, before, place, low, high = _rows_of(
        tl.program_id(0) // SHAPE.groups, starts, lengths, first, places, ALONE
    )
    table = tables + b.to(tl.int64) * table_stride
    pages = pages_of(table, k_codes, k_scales, v_codes, v_scales, group, SHAPE)
    TOKENS: tl.constexpr = LINES // SHAPE.together
    for row in tl.range(low + tl.program_id(2) * TOKENS, high, tl.num_programs(2) * TOKENS, num_stages=1):
        line_row, head, there, view, first_end, last_start = lines_of(row, high, before, group, window, SHAPE, LINES)
        seen_from, seen_to = view[2], view[3]
        queries = load_queries(q, q_stride, begin + line_row, head, there, k_channels, SHAPE)
        line = (place + line_row).to(tl.int64) * SHAPE.heads + head
        first_split, last_split = seen_from // SHAPE.split, tl.cdiv(seen_to, SHAPE.split)
        for split in tl.range(first_split + tl.program_id(1), last_split, tl.num_programs(1), num_stages=1):
            from_token = tl.maximum(split * SHAPE.split, seen_from // SHAPE.tile * SHAPE.tile)
            to_token = tl.minimum(split * SHAPE.split + SHAPE.split, seen_to)
            state, _before = attend_tiles(
                from_token, to_token, first_end, last_start, queries, no_tokens(LINES, SHAPE), view, pages,
                bend, unit, SHAPE, LINES, False,
            )  # fmt: skip
            _store_state(states, line * splits + split, places * splits, there, state, SHAPE)


@triton.jit
def _store_state(
    states: tl.tensor, at: tl.tensor, count: tl.tensor, there: tl.tensor, state: tl.tuple, SHAPE: tl.constexpr
) -> None:
    """states: pointer to fp32: `most` of each place, head and split; then `weight` of each; then the `dims` columns of
    `sums`. at: int64 [LINES], which one each line's is; count: how many there are for each head."""
    most, weight, sums = state
    count = count.to(tl.int64) * SHAPE.heads
    column = tl.arange(0, SHAPE.width)
    tl.store(states + at, most, mask=there)
    tl.store(states + count + at, weight, mask=there)
    to = (states + 2 * count + at * SHAPE.dims)[:, None] + column[None, :]
    tl.store(to, sums, mask=there[:, None] & (column < SHAPE.dims)[None, :])


@triton.jit
def _load_state(
    states: tl.tensor, at: tl.tensor, count: tl.tensor, there: tl.tensor, SHAPE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """What `_store_state` stored; no tokens where none is there."""
    count = count.to(tl.int64) * SHAPE.heads
    column = tl.arange(0, SHAPE.width)
    most = tl.load(states + at, mask=there, other=NOTHING)
    weight = tl.load(states + count + at, mask=there, other=0.0)
    of = (states + 2 * count + at * SHAPE.dims)[:, None] + column[None, :]
    sums = tl.load(of, mask=there[:, None] & (column < SHAPE.dims)[None, :], other=0.0)
    return most, weight, sums


@triton.jit(
    do_not_specialize=["window", "first", "places", "splits"], do_not_specialize_on_alignment=["starts", "lengths"]
)
def merge_splits(
    states: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    v_channels: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    first: tl.tensor,
    places: tl.tensor,
    splits: tl.tensor,
    SHAPE: tl.constexpr,
    LINES: tl.constexpr,
    ALONE: tl.constexpr,
) -> None:
    """Grid: (sequences, programs that share lines: the heads of all rows)."""
    SPLIT: tl.constexpr = SHAPE.split
    _b, begin, before, place, low, high = _rows_of(tl.program_id(0), starts, lengths, first, places, ALONE)
    lines = (high - low) * SHAPE.heads
    for first_line in tl.range(tl.program_id(1) * LINES, lines, tl.num_programs(1) * LINES, num_stages=1):
        line = first_line + tl.arange(0, LINES)
        row, head, there = low + line // SHAPE.heads, line % SHAPE.heads, line < lines
        end = before + row + 1
        start = tl.maximum(end - window, 0)
        all_from = tl.maximum(before + low + first_line // SHAPE.heads + 1 - window, 0)
        all_to = before + tl.minimum(low + (first_line + LINES - 1) // SHAPE.heads, high - 1) + 1
        state = only_sinks(sinks, head, there, LINES, SHAPE)
        at = ((place + row).to(tl.int64) * SHAPE.heads + head) * splits
        for split in tl.range(all_from // SPLIT, tl.cdiv(all_to, SPLIT), loop_unroll_factor=4):
            seen = there & (split >= start // SPLIT) & (split * SPLIT < end)
            state = merged(state, _load_state(states, at + split, places * splits, seen, SHAPE))
        store_rows(out, begin + row, head, there, state, v_channels, SHAPE)
