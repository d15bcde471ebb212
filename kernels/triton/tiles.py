"""What a row's attention is: the arithmetic that `decode` and `prefill` share, so that both give the same bits.

Tokens are walked in tiles of SHAPE.tile, at multiples of that many. The tiles of a split, SHAPE.split tokens at
multiples of that many, are summed as flash attention does (Dao 2023), from nothing, and what splits give is merged in
their order. A tile or a split of which a row sees nothing changes none of its bits. So these do not depend on which
rows go together, nor on who computes which splits, as long as a product's row does not depend on how many there are.

What goes together, in tuples; LINES lines of a tile, each a row and one of its heads (`lines_of`):

    state   (most, weight, sums), fp32 [LINES], [LINES], [LINES, SHAPE.width]: of the tokens so far the highest score,
            in units that exp2 takes; the sum of the weights exp2(score - most); and that of weights times V. (m, l and
            O in the papers on flash attention.)
    view    (start, end, seen_from, seen_to), int32 [LINES], [LINES], scalars: a line sees the tokens [start, end) of
            its sequence, and no line sees one outside [seen_from, seen_to).
    pages   (table, k_codes, k_scales, v_codes, v_scales), pointers: int32, the blocks of the sequence; where in block 0
            codes and fp16 scales of the lines' key/value head begin.

Products are not fused with sums unless it says `fma`.
"""

import triton
import triton.language as tl

from kernels.triton.codes import (
    INTERPRETED,
    float_of_e4m3,
    float_of_e5m2,
    float_of_int8,
    high_int4,
    low_int4,
    narrowed,
    widened,
)

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
"""The highest score where no token is seen."""


# ------------------------------------------------------------------ lines and pages
@triton.jit
def lines_of(
    row: tl.tensor,
    rows: tl.tensor,
    before: tl.tensor,
    group: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
    LINES: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Lines of a tile are the heads of a group, for row `row` of a sequence and those after it, up to `rows`; `before`
    tokens lie before the sequence's row 0. -> row and head of each line, int32 [LINES], and whether it is there, bool
    [LINES]; the view; the end of what the first row sees; the start of what the last one sees."""
    PARTS: tl.constexpr = SHAPE.parts
    TOGETHER: tl.constexpr = SHAPE.together
    line = tl.arange(0, LINES)
    part = group % PARTS * TOGETHER + line % TOGETHER
    count = tl.minimum(rows - row, LINES // TOGETHER)
    there = (line // TOGETHER < count) & (part < SHAPE.group)
    first_end = before + row + 1
    end = first_end + tl.minimum(line // TOGETHER, count - 1)
    last_end = first_end + count - 1
    view = (tl.maximum(end - window, 0), end, tl.maximum(first_end - window, 0), last_end)
    head = group // PARTS * SHAPE.group + part
    return row + line // TOGETHER, head, there, view, first_end, tl.maximum(last_end - window, 0)


@triton.jit
def pages_of(
    table: tl.tensor,
    k_codes: tl.tensor,
    k_scales: tl.tensor,
    v_codes: tl.tensor,
    v_scales: tl.tensor,
    group: tl.tensor,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """k_codes and the like: where those of all heads begin in block 0 -> pages of the group's key/value head."""
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    slots = group // SHAPE.parts * SHAPE.page
    k_codes += slots * K.row
    v_codes += slots * V.row
    k_scales += slots * K.scales
    v_scales += slots * V.scales
    return table, k_codes, k_scales, v_codes, v_scales


# ------------------------------------------------------------------ operands of products
@triton.jit
def rounded(x: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """fp32 -> what `tl.dot` multiplies: of dtype NUMBER, in the interpreter those numbers in fp32."""
    y = narrowed(x, NUMBER)
    if INTERPRETED:
        y = widened(y)
    return y


@triton.jit
def operand(x: tl.tensor, NUMBER: tl.constexpr) -> tl.tensor:
    """Floats of any dtype -> what `tl.dot` multiplies."""
    if x.dtype != NUMBER:
        y = rounded(widened(x), NUMBER)
    elif INTERPRETED:
        y = widened(x)
    else:
        y = x
    return y


@triton.jit
def load_queries(
    q: tl.tensor,
    q_stride: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    there: tl.tensor,
    channels: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tensor:
    """row, head, there: of each line of the tile -> [lines, width]; lines that are not there are zeros."""
    dim = tl.arange(0, SHAPE.width)
    at = q + row.to(tl.int64) * q_stride + head * SHAPE.dims
    keep = there[:, None] & (dim < SHAPE.dims)[None, :]
    x = tl.load(at[:, None] + dim[None, :], mask=keep, other=0.0)
    if channels is not None:
        at = channels + head // SHAPE.group * SHAPE.dims
        x = widened(x) * tl.load(at[:, None] + dim[None, :], mask=keep, other=0.0)
    return operand(x, SHAPE.number)


@triton.jit
def load_scales(
    scales: tl.tensor, block: tl.tensor, slot: tl.tensor, there: tl.tensor, SHAPE: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """One for each token, fp32; 0 where none is there."""
    at = scales + block * SHAPE.words + slot
    if MASKED:
        x = tl.load(at, mask=there, other=0.0)
    else:
        x = tl.load(at)
    return x.to(tl.float32)


@triton.jit
def load_codes(
    codes: tl.tensor,
    block: tl.tensor,
    slot: tl.tensor,
    there: tl.tensor,
    HALF: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[tile, HALF.width] as they are stored; 0 where none is there."""
    column = tl.arange(0, HALF.width)
    at = (codes + block * HALF.block + slot * HALF.row)[:, None] + column[None, :]
    if MASKED:
        x = tl.load(at, mask=there[:, None] & (column < HALF.row)[None, :], other=0)
    elif HALF.width != HALF.row:
        x = tl.load(at, mask=(column < HALF.row)[None, :], other=0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_of_groups(
    at: tl.tensor, there: tl.tensor, HALF: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """fp16 at `at`, [tile, GROUPS], of which there are HALF.scales -> fp32; 0 where none is. A mask keeps loads from
    being on their way while others are computed: where all are there, it is none."""
    inside = (tl.arange(0, GROUPS) < HALF.scales)[None, :]
    if MASKED:
        x = tl.load(at, mask=there[:, None] & inside, other=0.0)
    elif HALF.scales != GROUPS:
        x = tl.load(at, mask=inside, other=0.0)
    else:
        x = tl.load(at)
    return x.to(tl.float32)


@triton.jit
def load_numbers(
    codes: tl.tensor,
    scales: tl.tensor,
    block: tl.tensor,
    slot: tl.tensor,
    there: tl.tensor,
    HALF: tl.constexpr,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """K or V of a tile's tokens -> [tile, width], what `tl.dot` multiplies. The columns of V in four bits are in the
    order of `column_dims`."""
    x = load_codes(codes, block, slot, there, HALF, MASKED)
    if HALF.format == "int4":
        TILE: tl.constexpr = SHAPE.tile
        WIDTH: tl.constexpr = SHAPE.width
        GROUPS: tl.constexpr = WIDTH // 32
        at = (scales + block * SHAPE.words + slot)[:, None] + tl.arange(0, GROUPS)[None, :] * SHAPE.page
        scale = load_of_groups(at, there, HALF, GROUPS, MASKED)[:, :, None]
        zero = load_of_groups(at + HALF.zeros, there, HALF, GROUPS, MASKED)[:, :, None]
        x = tl.reshape(x, (TILE, GROUPS, 16))  # a code has 4 bits and a scale 11: their product needs no rounding
        pairs = tl.join(tl.fma(low_int4(x), scale, zero), tl.fma(high_int4(x), scale, zero))
        y = rounded(tl.reshape(pairs, (TILE, WIDTH)), SHAPE.number)
    elif HALF.format == "int8":
        y = rounded(float_of_int8(x), SHAPE.number)
    elif HALF.format == "fp8_e4m3":
        if not INTERPRETED and tl.target_info.cuda_capability_geq(8, 9):  # which converts by itself, and exactly
            y = x.to(tl.float8e4nv, bitcast=True).to(SHAPE.number)
        else:
            y = rounded(float_of_e4m3(x), SHAPE.number)
    elif HALF.format == "fp8_e5m2":
        y = rounded(float_of_e5m2(x), SHAPE.number)
    else:
        y = operand(x, SHAPE.number)
    return y


@triton.jit
def column_dims(SHAPE: tl.constexpr) -> tl.tensor:
    """Which dim of V each column of the sums is: in four bits a byte holds dims j and j + 16 of 32, and becomes two
    columns side by side."""
    column = tl.arange(0, SHAPE.width)
    if SHAPE.v.format == "int4":
        dim = column // 32 * 32 + column % 2 * 16 + column % 32 // 2
    else:
        dim = column
    return dim


# ------------------------------------------------------------------ states
@triton.jit
def no_tokens(LINES: tl.constexpr, SHAPE: tl.constexpr) -> tuple[tl.tensor, ...]:
    """-> the state before any."""
    WIDTH: tl.constexpr = SHAPE.width
    most = tl.full((LINES,), NOTHING, tl.float32)
    return most, tl.zeros((LINES,), tl.float32), tl.zeros((LINES, WIDTH), tl.float32)


@triton.jit
def only_sinks(
    sinks: tl.tensor, head: tl.tensor, there: tl.tensor, LINES: tl.constexpr, SHAPE: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """-> the state that splits are merged into. sinks: pointer to fp32 [heads], or None; a sink is a token whose V is
    0."""
    most, weight, sums = no_tokens(LINES, SHAPE)
    if sinks is not None:
        most = tl.load(sinks + head, mask=there, other=NOTHING) * LOG2_E
        weight += 1.0
    return most, weight, sums


@triton.jit
def merged(state: tl.tuple, following: tl.tuple) -> tuple[tl.tensor, ...]:
    """The state of splits up to one, and that of the next one -> of all of them."""
    most, weight, sums = state
    next_most, next_weight, next_sums = following
    highest = tl.maximum(most, next_most)
    base = tl.where(highest == NOTHING, 0.0, highest)
    old, new = tl.exp2(most - base), tl.exp2(next_most - base)
    return highest, weight * old + next_weight * new, sums * old[:, None] + next_sums * new[:, None]


@triton.jit
def store_rows(
    out: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    there: tl.tensor,
    state: tl.tuple,
    channels: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """To out [rows, heads, dims], of each line, what its weights make of V; 0 where it sees no token.

    channels: pointer to fp32 [kv_heads, dims], by which V was divided; or None."""
    _most, weight, sums = state
    dim = column_dims(SHAPE)
    keep = there[:, None] & (dim < SHAPE.dims)[None, :]
    x = sums / tl.where(weight == 0.0, 1.0, weight)[:, None]
    if channels is not None:
        at = channels + head // SHAPE.group * SHAPE.dims
        x = x * tl.load(at[:, None] + dim[None, :], mask=keep, other=0.0)
    x = x + 0.0  # no -0: it would tell whether others of the tile see more tokens
    at = out + (row.to(tl.int64) * SHAPE.heads + head) * SHAPE.dims
    tl.store(at[:, None] + dim[None, :], narrowed(x, out.dtype.element_ty), mask=keep)


# ------------------------------------------------------------------ the walk
@triton.jit
def attend_tile(
    first: tl.tensor,
    q: tl.tensor,
    state: tl.tuple,
    view: tl.tuple,
    pages: tl.tuple,
    bend: tl.tensor,
    unit: tl.tensor,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The state, and the tile that begins at token `first`, -> the state with it. Not MASKED: all lines see all of its
    tokens.

    q: [LINES, SHAPE.width], of `load_queries`; a score is q . k x unit, or with a soft cap tanh(q . k x bend) x unit.
    """
    most, weight, sums = state
    K: tl.constexpr = SHAPE.k
    V: tl.constexpr = SHAPE.v
    start, end, seen_from, seen_to = view
    table, k_codes, k_scales, v_codes, v_scales = pages
    token = first + tl.arange(0, SHAPE.tile)
    there = (token >= seen_from) & (token < seen_to)
    seen = (token[None, :] >= start[:, None]) & (token[None, :] < end[:, None])
    at = table + token // SHAPE.page
    if MASKED:
        block = tl.load(at, mask=there, other=0).to(tl.int64)
    else:
        block = tl.load(at).to(tl.int64)
    slot = token % SHAPE.page

    k = load_numbers(k_codes, k_scales, block, slot, there, K, SHAPE, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if K.is_scaled:
        scores = scores * load_scales(k_scales, block, slot, there, SHAPE, MASKED)[None, :]
    if SHAPE.is_capped:
        scores = 2.0 * tl.sigmoid(2.0 * (scores * bend)) - 1.0  # tanh
    if MASKED:
        scores = tl.where(seen, scores, NOTHING)
    highest = tl.maximum(most, tl.max(scores, 1) * unit)
    base = tl.where(highest == NOTHING, 0.0, highest)
    weights = tl.exp2(tl.fma(scores, unit, -base[:, None]))
    old = tl.exp2(most - base)
    weight = weight * old + tl.sum(weights, 1)
    if V.is_scaled:
        weights = weights * load_scales(v_scales, block, slot, there, SHAPE, MASKED)[None, :]

    v = load_numbers(v_codes, v_scales, block, slot, there, V, SHAPE, MASKED)
    if MASKED:
        weights = tl.where(seen, weights, 0.0)  # whatever the scales of the other tokens are
        finite = tl.abs(widened(v)) < float("inf")
        broken = tl.max(tl.where(finite, 0, 1), 1)
        sees_broken = tl.max(tl.where(seen, broken[None, :], 0), 1)
        weight = tl.where(sees_broken > 0, float("nan"), weight)
        v = tl.where(finite, v, 0.0)  # 0 x NaN would reach lines that do not see it
    sums = tl.dot(rounded(weights, SHAPE.number), v, sums * old[:, None], input_precision="tf32x3")
    return highest, weight, sums


@triton.jit
def attend_next(
    first: tl.tensor,
    q: tl.tensor,
    split: tl.tuple,
    before: tl.tuple,
    view: tl.tuple,
    pages: tl.tuple,
    bend: tl.tensor,
    unit: tl.tensor,
    SHAPE: tl.constexpr,
    LINES: tl.constexpr,
    MERGES: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:
    """`attend_tile`. split, before: states, of the tile's split and of those before it. With MERGES, where the tile
    begins a split, the one before is merged first."""
    if MERGES and first % SHAPE.split == 0:
        before = merged(before, split)
        split = no_tokens(LINES, SHAPE)
    return attend_tile(first, q, split, view, pages, bend, unit, SHAPE, MASKED), before


@triton.jit
def attend_tiles(
    low: tl.tensor,
    high: tl.tensor,
    least_end: tl.tensor,
    last_start: tl.tensor,
    q: tl.tensor,
    before: tl.tuple,
    view: tl.tuple,
    pages: tl.tuple,
    bend: tl.tensor,
    unit: tl.tensor,
    SHAPE: tl.constexpr,
    LINES: tl.constexpr,
    MERGES: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:
    """Tokens in [low, high), `low` a multiple of SHAPE.tile -> the state of the last split, and `before`, with which
    MERGES merges those before it. Tiles between the last line's start and the first one's end are seen by all lines."""
    TILE: tl.constexpr = SHAPE.tile
    split = no_tokens(LINES, SHAPE)
    whole_from = low
    if SHAPE.is_windowed:
        whole_from = tl.minimum(tl.cdiv(last_start, TILE), tl.cdiv(high, TILE)) * TILE
        whole_from = tl.maximum(low, whole_from)
        for first in tl.range(low, whole_from, TILE, num_stages=1):
            split, before = attend_next(first, q, split, before, view, pages, bend, unit, SHAPE, LINES, MERGES, True)
    whole_to = tl.maximum(tl.minimum(high, least_end) // TILE * TILE, whole_from)
    for first in tl.range(whole_from, whole_to, TILE):
        split, before = attend_next(first, q, split, before, view, pages, bend, unit, SHAPE, LINES, MERGES, False)
    for first in tl.range(whole_to, high, TILE, num_stages=1):
        split, before = attend_next(first, q, split, before, view, pages, bend, unit, SHAPE, LINES, MERGES, True)
    return split, before
