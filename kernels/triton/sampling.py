"""Draws of tokens. Contract: `kernels.ops`; arithmetic: `kernels.reference.sampling`, to the bit, so the same tokens.

Three launches:

    _find_maxima   all of a row, some programs a row: the maxima of groups of neighbouring tokens
    _measure       all of a row, some programs a row; no limits: the draw; top-p without top-k: the sum of weights
    _finish        one program a row: the first of the maximum, the best draw, or the draw under limits (`truncation`)

Sums of weights are sums of integers, and the best score is the best in any order, so how many programs share a row
does not matter: S decides it, and a token still depends on its row only.

What the kernels are given, each a pointer but for whole numbers:

    logits                        [rows, vocab], any float dtype, rows `stride` numbers apart
    temperature, top_p, min_p     fp32 [rows]
    top_k                         int32 [rows]
    seeds, choices, positions     int64 [rows]
    maxima                        fp32 [rows, WIDTH], of which a row has `groups`: of GROUP neighbouring tokens each
    totals, scores, winners       int64, fp32, int32 [rows, chunks]: what each program that shares a row has found
    scratch                       int64 [rows, WIDTH + CANDIDATES]
    drawn                         int64 [rows]
"""

import torch
import triton
import triton.language as tl

from kernels.ops import LARGEST_VOCABULARY
from kernels.triton.device import PLAIN
from kernels.triton.gumbel import (
    GREEDY_BELOW,
    INFINITY,
    LAST_ID,
    best_of,
    load_logits,
    load_maxima,
    scale_of,
    score_of,
    t_of,
    tile_words,
    weight_of,
)
from kernels.triton.truncation import draw_truncated

GROUP = 128
"""Neighbouring tokens whose maximum is known, at least; a power of two."""
GROUPS = 1024
"""How many there are in a row at most; a power of two."""
TILE = 2048
"""Tokens that a program works on at a time; a power of two."""
CANDIDATES = 1024
"""Tokens of a row that are sorted; a power of two."""
PROGRAMS = 1024
"""How many should share the passes over whole rows."""
CHUNKS = LARGEST_VOCABULARY // TILE
"""By how many a row is shared at most; a power of two."""
COLUMNS = ["temperature", "top_k", "top_p", "min_p", "seeds", "choices", "positions"]
"""What rows are drawn by."""


@triton.jit(do_not_specialize=["tiles"])
def _find_maxima(
    logits: tl.tensor,
    stride: tl.tensor,
    maxima: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    tiles: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes maxima: infinite where there is a NaN, -infinity of groups beyond the vocabulary.

    Grid: (rows, chunks), a chunk being `tiles` tiles of TILE tokens."""
    row = tl.program_id(0).to(tl.int64)
    for i in range(tiles):
        group = (tl.program_id(1) * tiles + i) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = load_logits(logits + row * stride, token, token < vocab)
        tl.store(maxima + row * WIDTH + group, tl.max(tl.where(x == x, x, INFINITY), 1), group < groups)


@triton.jit(do_not_specialize=["tiles", "chunks"], do_not_specialize_on_alignment=COLUMNS)
def _measure(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    tiles: tl.tensor,
    chunks: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Writes, of rows that are drawn without limits, the best score of a chunk and whose it is (winners); of those with
    top-p and no top-k what a chunk weighs (totals); of others, and where no maximum is finite, nothing.

    Grid: (rows, chunks), a chunk being `tiles` tiles of TILE tokens."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, k, p, m = _load_limits(row, temperature, top_k, top_p, min_p, vocab)
    if (temperature >= GREEDY_BELOW) & (k == 0) & ((p < 1.0) | (m <= 0.0)):
        top = tl.max(load_maxima(maxima + row * WIDTH, groups, WIDTH), 0)
        if tl.abs(top) < INFINITY:
            x, scale, lane = logits + row * stride, scale_of(temperature), tl.arange(0, TILE)
            out = row * chunks + chunk
            if p < 1.0:
                sums = tl.zeros([TILE], tl.int64)
                for i in range(tiles):
                    token = (chunk * tiles + i) * TILE + lane
                    sums += weight_of(t_of(load_logits(x, token, token < vocab), top, scale))
                tl.store(totals + out, tl.sum(sums, 0))
            else:
                seed, choice, position = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
                best, winner = tl.full([TILE], float("-inf"), tl.float32), lane
                for i in range(tiles):
                    tile = chunk * tiles + i
                    token = tile * TILE + lane
                    found = load_logits(x, token, token < vocab)
                    score = score_of(t_of(found, top, scale), tile_words(seed, choice, position, tile, TILE))
                    better = (score > best) & (found > -INFINITY)
                    best, winner = tl.where(better, score, best), tl.where(better, token, winner)
                tl.store(scores + out, tl.max(best, 0))
                tl.store(winners + out, best_of(best, winner))


@triton.jit(do_not_specialize=["chunks"], do_not_specialize_on_alignment=COLUMNS)
def _finish(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    maxima: tl.tensor,
    totals: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    scratch: tl.tensor,
    drawn: tl.tensor,
    vocab: tl.tensor,
    groups: tl.tensor,
    chunks: tl.tensor,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    """Writes drawn, -1 where no maximum is finite. Grid: (rows,)"""
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, m = _load_limits(row, temperature, top_k, top_p, min_p, vocab)
    x, maxima, scratch = logits + row * stride, maxima + row * WIDTH, scratch + row * (WIDTH + CANDIDATES)
    of_groups = load_maxima(maxima, groups, WIDTH)
    top = tl.max(of_groups, 0)
    chunk, inside = row * chunks + tl.arange(0, CHUNKS), tl.arange(0, CHUNKS) < chunks
    token = tl.full((), -1, tl.int32)
    if tl.abs(top) < INFINITY:
        if temperature < GREEDY_BELOW:
            group = tl.min(tl.where(of_groups == top, tl.arange(0, WIDTH), WIDTH), 0)
            place = group * GROUP + tl.arange(0, GROUP)
            token = tl.min(tl.where(load_logits(x, place, place < vocab) == top, place, LAST_ID), 0)
        elif (k == 0) & (p >= 1.0) & (m <= 0.0):
            best = tl.load(scores + chunk, inside, other=float("-inf"))
            token = best_of(best, tl.load(winners + chunk, inside, other=0))
        else:
            total = tl.full((), 0, tl.int64)
            if (k == 0) & (p < 1.0):
                total = tl.sum(tl.load(totals + chunk, inside, other=0), 0)
            source = tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row)
            token = draw_truncated(
                x, vocab, maxima, groups, scratch, temperature, k, p, m, total, source, WIDTH, GROUP, TILE, CANDIDATES
            )
    tl.store(drawn + row, token.to(tl.int64))


@triton.jit
def _load_limits(
    row: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, vocab: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Of a row: its temperature, fp32; top_k, int32, 0 if it leaves all; top_p and min_p, fp32."""
    k = tl.load(top_k + row)
    return tl.load(temperature + row), tl.where(k >= vocab, 0, k), tl.load(top_p + row), tl.load(min_p + row)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    (rows, vocab), device = logits.shape, logits.device
    drawn = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return drawn
    tiles = triton.cdiv(vocab, TILE)
    group = max(GROUP, triton.next_power_of_2(triton.cdiv(vocab, GROUPS)))
    groups = tiles * (TILE // group)  # all of the tiles', so that loads may be wide
    width = triton.next_power_of_2(groups)
    tiles_each = triton.cdiv(tiles, max(1, PROGRAMS // rows))
    chunks = triton.cdiv(tiles, tiles_each)
    maxima = torch.empty((rows, width), dtype=torch.float32, device=device)
    totals = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    scores = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    scratch = torch.empty((rows, width + CANDIDATES), dtype=torch.int64, device=device)
    columns = temperature, top_k, top_p, min_p, seeds, choices, positions
    partial = maxima, totals, scores, winners
    row, stride = logits, logits.stride(0)
    _find_maxima[rows, chunks](
        row, stride, maxima, vocab, groups, tiles_each, WIDTH=width, GROUP=group, TILE=TILE, num_warps=4, **PLAIN
    )
    _measure[rows, chunks](
        row, stride, *columns, *partial, vocab, groups, tiles_each, chunks, WIDTH=width, TILE=TILE, num_warps=4, **PLAIN
    )
    _finish[rows,](
        row, stride, *columns, *partial, scratch, drawn, vocab, groups, chunks,
        WIDTH=width, CHUNKS=CHUNKS, GROUP=group, TILE=TILE, CANDIDATES=CANDIDATES, num_warps=16, **PLAIN,
    )  # fmt: skip
    return drawn
