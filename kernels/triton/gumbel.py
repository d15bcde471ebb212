"""Numbers from which tokens are drawn, inside Triton kernels: the arithmetic of `kernels.reference.sampling`, to the
bit, in kernels that are launched with `PLAIN`: products are rounded before they are added to something.

[...]: any shape, [] a scalar; a logit is an fp32 of `load_logits`, token ids are int32.
"""

import triton
import triton.language as tl

from kernels.reference import sampling as formulas
from kernels.triton.codes import bits_of, of_bits, widened

LOG2_E = tl.constexpr(formulas.LOG2_E)
GREEDY_BELOW = tl.constexpr(formulas.GREEDY_BELOW)
LOWEST = tl.constexpr(formulas.LOWEST)
LEAST_T = tl.constexpr(formulas.LEAST_T)
POINT = tl.constexpr(formulas.POINT)
SQRT_HALF = tl.constexpr(formulas.SQRT_HALF)
NEAR_ONE = tl.constexpr(formulas.NEAR_ONE)
LOG2_SERIES, LOG2_COUNT = tl.constexpr(formulas.LOG2_SERIES), tl.constexpr(len(formulas.LOG2_SERIES))
EXP2_SERIES, EXP2_COUNT = tl.constexpr(formulas.EXP2_SERIES), tl.constexpr(len(formulas.EXP2_SERIES))
LEAST_NORMAL = tl.constexpr(2.0**-126)
TO_UNIT = tl.constexpr(2.0**-32)
TO_DIGITS = tl.constexpr(2.0**24)
INFINITY = tl.constexpr(float("inf"))
NO_KEY = tl.constexpr(-0x7F800001)
"""The key of -infinity."""
LAST_ID = tl.constexpr(0x7FFFFFFF)


# ------------------------------------------------------------------ chances
@triton.jit
def _series(x: tl.tensor, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """fp32 [...] -> fp32 [...]: x * (c0 + x * (c1 + ...)), each product and each sum rounded."""
    total = x * COEFFICIENTS[COUNT - 1]
    for i in tl.static_range(1, COUNT):
        total = (total + COEFFICIENTS[COUNT - 1 - i]) * x
    return total


@triton.jit
def _exponent(x: tl.tensor) -> tl.tensor:
    """fp32 [...], positive and normal -> int32 [...]: x = 2^exponent * (1 + over), sqrt(1/2) <= 1 + over < sqrt(2)"""
    return (bits_of(x) - SQRT_HALF) >> 23


@triton.jit
def _over(x: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """-> over, fp32 [...]."""
    return of_bits(bits_of(x) - (exponent << 23)) - 1.0


@triton.jit
def log2_of(x: tl.tensor) -> tl.tensor:
    """fp32 [...], positive and normal -> its logarithm, fp32 [...]."""
    exponent = _exponent(x)
    return exponent.to(tl.float32) + _series(_over(x, exponent), LOG2_SERIES, LOG2_COUNT)


@triton.jit
def scale_of(temperature: tl.tensor) -> tl.tensor:
    """fp32 [] -> log2(e) / temperature, fp32 []."""
    return tl.div_rn(tl.full((), LOG2_E, tl.float32), temperature)


@triton.jit
def t_of(x: tl.tensor, top: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Logits [...], the maximum of their row [] and its `scale_of` [] -> t, fp32 [...], at most 0: a token's chance is
    2^t, up to a factor."""
    return tl.maximum(x - top, LOWEST) * scale


@triton.jit
def least_t_of(min_p: tl.tensor) -> tl.tensor:
    """fp32 [] -> fp32 []: the t of a token that is min_p times as likely as the first; -infinity where min_p is off."""
    return tl.where(min_p > 0.0, log2_of(tl.maximum(min_p, LEAST_NORMAL)), -INFINITY)


@triton.jit
def weight_of(t: tl.tensor) -> tl.tensor:
    """t [...] -> int64 [...]: 2^t, where 2^(24 + POINT) is 1, so that sums of weights do not depend on their order."""
    t = tl.maximum(t, LEAST_T)
    halvings = (-t).to(tl.int32)
    digits = (1.0 + _series(t + halvings.to(tl.float32), EXP2_SERIES, EXP2_COUNT)) * TO_DIGITS
    return (digits.to(tl.int64) << POINT) >> halvings.to(tl.int64)


# ------------------------------------------------------------------ scores
@triton.jit
def words_of(seed: tl.tensor, choice: tl.tensor, position: tl.tensor, block: tl.tensor) -> tuple[tl.tensor, ...]:
    """seed, choice, position: int64 [], of the row; block: int32 [...], numbers of four neighbouring tokens -> four of
    uint32 [...]: the words of the first, second, third and fourth of them."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, low, high, choice.to(tl.int32), block + 1)
    return a, b, c, d


@triton.jit
def tile_words(
    seed: tl.tensor, choice: tl.tensor, position: tl.tensor, tile: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """tile: int32 [] -> uint32 [TILE]: the words of the tokens from tile * TILE on."""
    a, b, c, d = words_of(seed, choice, position, tile * (TILE // 4) + tl.arange(0, TILE // 4))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def score_of(t: tl.tensor, word: tl.tensor) -> tl.tensor:
    """t [...] and the tokens' words, uint32 [...] -> fp32 [...]: t - log2(-log2(u)), u the word in (0, 1)."""
    uniform = (word.to(tl.float32) + 0.5) * TO_UNIT
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * TO_UNIT
    exponent = _exponent(uniform)
    over = tl.where(rest < NEAR_ONE, -rest, _over(uniform, exponent))
    return t - log2_of(-(exponent.to(tl.float32) + _series(over, LOG2_SERIES, LOG2_COUNT)))


@triton.jit
def best_of(score: tl.tensor, token: tl.tensor) -> tl.tensor:
    """fp32 [N], tokens [N] -> the token [] with the highest score, of equals the lowest."""
    return tl.min(tl.where(score == tl.max(score, 0), token, LAST_ID), 0)


# ------------------------------------------------------------------ rows and their order
@triton.jit
def load_logits(x: tl.tensor, token: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """x: pointer to a row in any float dtype; token, inside: [...] -> fp32 [...]: 0 for -0, -infinity outside."""
    logits = widened(tl.load(x + token, inside, other=float("-inf")))
    return tl.where(logits == 0.0, 0.0, logits)


@triton.jit
def load_maxima(maxima: tl.tensor, groups: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """maxima: pointer to fp32, those of a row's groups, infinite where there is a NaN -> fp32 [WIDTH]; -infinity beyond
    the `groups` that there are."""
    group = tl.arange(0, WIDTH)
    return tl.load(maxima + group, group < groups, other=float("-inf"))


@triton.jit
def key_of(x: tl.tensor) -> tl.tensor:
    """Logits [...] -> int32 [...] of the same order."""
    bits = bits_of(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """int32 [...] -> the logits that have these keys."""
    return of_bits(key ^ ((key >> 31) & 0x7FFFFFFF))


@triton.jit
def entry_of(key: tl.tensor, number: tl.tensor) -> tl.tensor:
    """key, number (not negative): int32 [...] -> int64 [...], in whose descending order the greater key comes first, of
    equals the lower number."""
    return (key.to(tl.int64) << 32) | (number ^ LAST_ID).to(tl.int64)


@triton.jit
def key_in(entry: tl.tensor) -> tl.tensor:
    """int64 [...] -> int32 [...]"""
    return (entry >> 32).to(tl.int32)


@triton.jit
def number_in(entry: tl.tensor) -> tl.tensor:
    """int64 [...] -> int32 [...]"""
    return (entry & 0xFFFFFFFF).to(tl.int32) ^ LAST_ID
