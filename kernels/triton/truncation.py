"""The draw of a token from what top-k, top-p and min-p leave of a row, by one program, without a sort of the row.

Tokens lie in groups of GROUP neighbours, whose maxima are known. What is kept is the most likely few, and those lie in
the groups with the largest maxima: all tokens above the maximum of the r-th group (r from 0) are in the r groups before
it. So `_walk` looks at some groups, then at twice as many, and so on, until the tokens above the next group's
maximum are enough: top_k of them, or top_p of the weight, or all that min_p leaves. It collects them, and sorted, they
are cut as the definition says. Should there be more than CANDIDATES (flat rows, thousands of equal logits), then the
walk has at least found between which two logits the order is cut, and `_search` finds the one by passes over the row
that quarter the interval (a search by pivots, as in Qrita: arXiv 2602.01518).

What stays together, in tuples of scalars:

    row      pointer to its logits, in any float dtype; its maximum and `scale_of`, fp32; the vocabulary, int32
    limits   top_k, int32, 0: off; top_p, fp32; `least_t_of` min_p, fp32; fp64 `_share_of` top_p: how much the tokens
             before the last that is kept may weigh, where it is known already
    source   seed, choice, position, int64: of the random words

A key is an int32 in the order of logits (`key_of`), an entry an int64 of a key and of a group's or token's number
(`entry_of`), a weight an int64 (`weight_of`). Numbers of tokens are int32.
"""

import triton
import triton.language as tl

from kernels.triton.gumbel import (
    INFINITY,
    LAST_ID,
    NO_KEY,
    best_of,
    entry_of,
    key_in,
    key_of,
    least_t_of,
    load_logits,
    load_maxima,
    logit_of,
    number_in,
    scale_of,
    score_of,
    t_of,
    tile_words,
    weight_of,
    words_of,
)


@triton.jit
def draw_truncated(
    x: tl.tensor,
    vocab: tl.tensor,
    maxima: tl.tensor,
    groups: tl.tensor,
    scratch: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    total: tl.tensor,
    source: tl.tuple,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """-> a token, int32. Pointers: x, to the row's logits in any float dtype; maxima, to fp32 [WIDTH], those of its
    `groups` groups of GROUP tokens, the largest finite; scratch, to int64 [WIDTH + CANDIDATES].

    temperature, top_p, min_p: fp32; top_k: int32, 0: off; total: int64, the weight of the row, where top_p cuts all of
    it; source: as above."""
    order, found = scratch, scratch + WIDTH
    group = tl.arange(0, WIDTH)
    of_groups = load_maxima(maxima, groups, WIDTH)
    tl.store(order + group, tl.sort(entry_of(key_of(of_groups), group), descending=True))
    tl.debug_barrier()
    row = x, tl.max(of_groups, 0), scale_of(temperature), vocab
    limits = top_k, top_p, least_t_of(min_p), _share_of(top_p, total)
    count, floor, above, weight_above, ceiling = _walk(row, limits, order, found, groups, GROUP, TILE, CANDIDATES)
    tl.debug_barrier()
    if count <= CANDIDATES:
        token = _draw_sorted(row, limits, source, found, count, CANDIDATES)
    else:
        token = _draw_cut(row, limits, source, floor, ceiling, count, above, weight_above, TILE)
    return token


@triton.jit
def _share_of(top_p: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """fp32, int64 -> fp64: what the tokens before the last that is kept may weigh, of so much weight; infinite if all
    are kept."""
    return tl.where(top_p < 1.0, top_p.to(tl.float64) * weight.to(tl.float64), INFINITY)


@triton.jit
def _is_kept(rank: tl.tensor, before: tl.tensor, top_k: tl.tensor, share: tl.tensor) -> tl.tensor:
    """By top-k and top-p: bool [...]. rank: int32 [...], how many tokens come before; before: int64 [...], what they
    weigh; share: as in limits."""
    return (rank < tl.where(top_k > 0, top_k, LAST_ID)) & ((rank == 0) | (before.to(tl.float64) < share))


@triton.jit
def _walk(
    row: tl.tuple,
    limits: tl.tuple,
    order: tl.tensor,
    found: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Puts the tokens above a floor into `found`, as far as there is room. Groups are in `order` of their maxima.

    order, found: pointers to entries, [WIDTH] of groups, [CANDIDATES] of tokens.
    -> how many they are, the floor, a key; how many lay above the floor before (too few), their weight, and that floor.
    """
    x, top, scale, vocab = row
    top_k, top_p, least_t, share = limits
    PART: tl.constexpr = TILE // GROUP
    lane = tl.arange(0, TILE)
    floor, ceiling = key_of(top), key_of(top)
    count, above = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    weight, weight_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    looks = tl.minimum(tl.maximum(top_k, PART), groups)
    goes_on = looks > 0
    while goes_on:
        above, weight_above, ceiling = count, weight, floor
        floor = tl.where(looks < groups, key_in(tl.load(order + looks, looks < groups, other=0)), NO_KEY)
        for first in range(0, looks, PART):
            place = first + lane // GROUP
            token = number_in(tl.load(order + place, place < looks, other=0)) * GROUP + lane % GROUP
            logits = load_logits(x, token, (place < looks) & (token < vocab))
            key = key_of(logits)
            taken = (key > floor) & (key <= ceiling)
            at = count + tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(found + at, entry_of(key, token), taken & (at < CANDIDATES))
            count += tl.sum(taken.to(tl.int32), 0)
            weight += tl.sum(tl.where(taken, weight_of(t_of(logits, top, scale)), 0), 0)
        reaches_k = (top_k > 0) & (count >= top_k)
        reaches_p = (top_k == 0) & (weight.to(tl.float64) >= share)
        passes_m = ((top_k == 0) | (top_p >= 1.0)) & (t_of(logit_of(floor), top, scale) < least_t)
        goes_on = (looks < groups) & ((reaches_k | reaches_p | passes_m) == 0)
        looks = tl.minimum(looks * 2, groups)
    return count, floor, above, weight_above, ceiling


@triton.jit
def _draw_sorted(
    row: tl.tuple, limits: tl.tuple, source: tl.tuple, found: tl.tensor, count: tl.tensor, CANDIDATES: tl.constexpr
) -> tl.tensor:
    """-> a token of the `count` in `found`, among which all that are kept are. found: pointer to entries
    [CANDIDATES]."""
    _, top, scale, _ = row
    top_k, top_p, least_t, share = limits
    seed, choice, position = source
    rank = tl.arange(0, CANDIDATES)
    nothing = tl.full((), NO_KEY, tl.int64) << 32
    entry = tl.sort(tl.load(found + rank, rank < count, other=nothing), descending=True)
    token, t = number_in(entry), t_of(logit_of(key_in(entry)), top, scale)
    weight = tl.where(rank < count, weight_of(t), 0)
    if top_k > 0:
        share = _share_of(top_p, tl.sum(tl.where(rank < top_k, weight, 0), 0))
    kept = _is_kept(rank, tl.cumsum(weight, 0) - weight, top_k, share) & (rank < count) & (t >= least_t)
    a, b, c, d = words_of(seed, choice, position, token >> 2)
    word = tl.where((token & 2) == 0, tl.where((token & 1) == 0, a, b), tl.where((token & 1) == 0, c, d))
    return best_of(tl.where(kept, score_of(t, word), -INFINITY), token)


@triton.jit
def _draw_cut(
    row: tl.tuple,
    limits: tl.tuple,
    source: tl.tuple,
    floor: tl.tensor,
    ceiling: tl.tensor,
    count: tl.tensor,
    above: tl.tensor,
    weight_above: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """-> a token of a row where `_walk` found `count` above the floor, too many to sort, and above the ceiling `above`,
    which weigh `weight_above`. floor, ceiling: keys."""
    _, top, scale, _ = row
    top_k, top_p, least_t, share = limits
    low, high = floor.to(tl.int64) + 1, ceiling.to(tl.int64) + 1
    if top_k > 0:
        low, high, count, above, weight_above = _search(row, limits, low, high, count, above, weight_above, False, TILE)
        if top_p < 1.0:
            tied = tl.minimum(top_k, count) - above
            weight = weight_above + tied * weight_of(t_of(logit_of(low.to(tl.int32)), top, scale))
            share = _share_of(top_p, weight)
            high, above, weight_above = key_of(top).to(tl.int64) + 1, above * 0, weight_above * 0
    limits = top_k, top_p, least_t, share
    if top_p < 1.0:
        low, high, count, above, weight_above = _search(row, limits, low, high, count, above, weight_above, True, TILE)
    return _draw_from(row, limits, source, low.to(tl.int32), above, weight_above, TILE)


@triton.jit
def _search(
    row: tl.tuple,
    limits: tl.tuple,
    low: tl.tensor,
    high: tl.tensor,
    count: tl.tensor,
    above: tl.tensor,
    weight_above: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Where the order is cut: the greatest key from which on there are top_k tokens, or the share of the weight.

    low, high: int64, keys from which on there are enough, `count` of them, and too few, `above` with `weight_above`.
    -> all five, high - low being 1.
    """
    x, top, scale, vocab = row
    top_k, _, _, share = limits
    lane = tl.arange(0, TILE)
    while high - low > 1:
        first = low + tl.maximum((high - low) // 4, 1)
        second = low + tl.maximum((high - low) // 2, 1)
        third = low + tl.maximum((high - low) * 3 // 4, 1)
        none, nothing = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
        counts_1, counts_2, counts_3, sums_1, sums_2, sums_3 = none, none, none, nothing, nothing, nothing
        for tile in range(tl.cdiv(vocab, TILE)):
            token = tile * TILE + lane
            logits = load_logits(x, token, token < vocab)
            key, weight = key_of(logits), weight_of(t_of(logits, top, scale))
            in_1, in_2, in_3 = key >= first.to(tl.int32), key >= second.to(tl.int32), key >= third.to(tl.int32)
            counts_1, sums_1 = counts_1 + in_1.to(tl.int32), sums_1 + tl.where(in_1, weight, 0)
            counts_2, sums_2 = counts_2 + in_2.to(tl.int32), sums_2 + tl.where(in_2, weight, 0)
            counts_3, sums_3 = counts_3 + in_3.to(tl.int32), sums_3 + tl.where(in_3, weight, 0)
        found = low, high, count, above, weight_above
        found = _narrowed(found, first, tl.sum(counts_1, 0), tl.sum(sums_1, 0), top_k, share, BY_WEIGHT)
        found = _narrowed(found, second, tl.sum(counts_2, 0), tl.sum(sums_2, 0), top_k, share, BY_WEIGHT)
        found = _narrowed(found, third, tl.sum(counts_3, 0), tl.sum(sums_3, 0), top_k, share, BY_WEIGHT)
        low, high, count, above, weight_above = found
    return low, high, count, above, weight_above


@triton.jit
def _narrowed(
    interval: tl.tuple,
    pivot: tl.tensor,
    count: tl.tensor,
    weight: tl.tensor,
    top_k: tl.tensor,
    share: tl.tensor,
    BY_WEIGHT: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The interval of `_search` (its five results), one of its ends moved to a pivot, int64, from which on there are
    `count` tokens of that weight."""
    low, high, count_low, above, weight_above = interval
    if BY_WEIGHT:
        is_enough = weight.to(tl.float64) >= share
    else:
        is_enough = count >= top_k
    rises, falls = is_enough & (pivot > low), (is_enough == 0) & (pivot < high)
    low, count_low = tl.where(rises, pivot, low), tl.where(rises, count, count_low)
    high, above = tl.where(falls, pivot, high), tl.where(falls, count, above)
    return low, high, count_low, above, tl.where(falls, weight, weight_above)


@triton.jit
def _draw_from(
    row: tl.tuple,
    limits: tl.tuple,
    source: tl.tuple,
    cut: tl.tensor,
    above: tl.tensor,
    weight_above: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """-> a token of those with a greater key than `cut`, which are `above` and weigh `weight_above`, and of the first
    with it."""
    x, top, scale, vocab = row
    top_k, _, least_t, share = limits
    seed, choice, position = source
    lane = tl.arange(0, TILE)
    cut_weight = weight_of(t_of(logit_of(cut), top, scale))
    best, winner = tl.full([TILE], float("-inf"), tl.float32), lane
    ties = tl.full((), 0, tl.int32)
    for tile in range(tl.cdiv(vocab, TILE)):
        token = tile * TILE + lane
        logits = load_logits(x, token, token < vocab)
        key, t = key_of(logits), t_of(logits, top, scale)
        is_tied = key == cut
        tie = ties + tl.cumsum(is_tied.to(tl.int32), 0) - 1
        rank, before = above + tie, weight_above + tie * cut_weight
        kept = ((key > cut) | (is_tied & _is_kept(rank, before, top_k, share))) & (t >= least_t)
        if tl.sum(kept.to(tl.int32), 0) > 0:
            score = score_of(t, tile_words(seed, choice, position, tile, TILE))
            better = kept & (score > best)
            best, winner = tl.where(better, score, best), tl.where(better, token, winner)
        ties += tl.sum(is_tied.to(tl.int32), 0)
    return best_of(best, winner)
