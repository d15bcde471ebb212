"""Draws of tokens from logits. Contract: `kernels.ops`. The arithmetic is here; every implementation follows it to the
bit: rounded products, sums and quotients of fp32 and fp64, integers, and no library's logarithm or exponential.

    t = (x - maximum) * (log2(e) / temperature)      a token's chance is 2^t, up to a factor
    weight = 2^t as a whole number of 2^-43          so that sums do not depend on the order of addition
    score = t - log2(-log2(u))                       the token with the highest score is drawn

With u uniform, -log2(u) has an exponential distribution, and a token has the highest score as often as its share of the
chances is (the "Gumbel-max trick": Gumbel 1954; Maddison, Tarlow and Minka 2014). u is word token % 4 of
Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011) with the seed as key and the counter (position, its upper half,
choice, 1 + token / 4). Where the last is 0 lies what `engine.runner.sampling.philox` draws.
"""

import torch

LOG2_E = 1.4426950408889634
GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy."""
LOWEST = -1e30
"""Differences of logits below it count as this one, so that no product is infinite."""
LEAST_T = -60.0
"""Weights of this t and less are 0."""
POINT = 19
"""Binary digits that a weight has more than a float: 2^19 weights of at most 2^43 fit 63 bits."""
SQRT_HALF = 0x3F3504F3
"""Bits of fp32 sqrt(1/2)."""
NEAR_ONE = 0.25
"""How far from 1 a uniform number may be for its logarithm to be worked out from the distance."""
LOG2_SERIES = (
    1.442694902420044,
    -0.7213525176048279,
    0.4809311330318451,
    -0.36026307940483093,
    0.286869615316391,
    -0.248329296708107,
    0.23570379614830017,
    -0.14970000088214874,
)
"""log2(1 + x) / x from sqrt(1/2) - 1 to sqrt(2) - 1, within 2.5e-7 (minimax)."""
EXP2_SERIES = (
    0.6931437253952026,
    0.2401801496744156,
    0.0552973598241806,
    0.00920579768717289,
    0.0009449035860598087,
)
"""(2^x - 1) / x from -1 to 0: 2^x within a share of 8.4e-8 (minimax)."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
NUMBERS = 2**22
"""Logits worked on at a time."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
    columns = temperature, top_k, top_p, min_p, seeds, choices, positions
    rows = max(1, NUMBERS // logits.shape[1])
    given = logits, *(column[:, None] for column in columns)
    return torch.cat([_draw(*part) for part in zip(*(torch.split(each, rows) for each in given), strict=True)])


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """What is not logits: [S, 1]."""
    maximum = logits.float().amax(dim=1, keepdim=True)
    is_good = maximum.isfinite()
    x = logits.float().where(is_good, 0.0)
    greedy = temperature < GREEDY_BELOW
    scale = torch.full_like(temperature, LOG2_E) / temperature.where(~greedy, 1.0)
    t = (x - maximum.where(is_good, 0.0)).clamp_min(LOWEST) * scale
    words = random_words(logits.shape[1], seeds, choices, positions)
    score = torch.where(greedy, x, t - log2(exponential(words)))
    score = score.where(keep(x, t, top_k, top_p, min_p), -torch.inf)
    tokens = torch.arange(x.shape[1], device=x.device)
    drawn = tokens.where(score == score.amax(dim=1, keepdim=True), x.shape[1]).amin(dim=1)
    return drawn.where(is_good[:, 0], -1)


def keep(
    x: torch.Tensor, t: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """x, t: [S, V]; limits: [S, 1] -> bool [S, V]: which tokens may be drawn."""
    x, order = x.where(x != 0.0, 0.0).sort(dim=1, descending=True, stable=True)  # -0 is 0
    t = t.gather(1, order)
    weight = weights(t)
    before = weight.cumsum(dim=1) - weight
    rank = torch.arange(x.shape[1], device=x.device)
    kept = (x > -torch.inf) & ((top_k == 0) | (rank < top_k))
    share = top_p.double() * weight.where(kept, 0).sum(dim=1, keepdim=True).double()
    kept &= (top_p >= 1.0) | (rank == 0) | (before.double() < share)
    kept &= t >= log2(min_p.clamp_min(2.0**-126)).where(min_p > 0.0, -torch.inf)
    return torch.empty_like(kept).scatter_(1, order, kept)


def weights(t: torch.Tensor) -> torch.Tensor:
    """t: fp32, at most 0 -> int64: 2^t, where 2^(24 + POINT) is 1."""
    t = t.clamp_min(LEAST_T)
    halvings = (-t).int()
    digits = (1.0 + _series(t + halvings.float(), EXP2_SERIES)) * 2.0**24
    return (digits.long() << POINT) >> halvings.long()


def log2(x: torch.Tensor) -> torch.Tensor:
    """x: fp32, positive and not subnormal -> its logarithm."""
    exponent, over = _split(x)
    return exponent + _series(over, LOG2_SERIES)


def exponential(words: torch.Tensor) -> torch.Tensor:
    """words: 32 bits in int64 -> -log2 of the uniform numbers that they are: fp32, of full precision near 0 too."""
    uniform = (words.float() + 0.5) * 2.0**-32
    rest = ((LOW - words).float() + 0.5) * 2.0**-32
    exponent, over = _split(uniform)
    return -(exponent + _series((-rest).where(rest < NEAR_ONE, over), LOG2_SERIES))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x = 2^exponent * (1 + over), sqrt(1/2) <= 1 + over < sqrt(2)"""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF) >> 23
    return exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1.0


def _series(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """x * (c0 + x * (c1 + ...)), each product and each sum rounded."""
    *rest, last = coefficients
    total = torch.full_like(x, last)
    for coefficient in reversed(rest):
        total = total * x + coefficient
    return total * x


def random_words(vocab: int, seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [S, 1] each -> [S, vocab]: 32 bits for each token."""
    block = 1 + torch.arange(-(-vocab // 4), device=seeds.device)
    counter = positions & LOW, positions >> 32 & LOW, choices & LOW, block
    words = philox4x32(counter, (seeds & LOW, seeds >> 32 & LOW))
    return torch.stack(words, dim=2).flatten(1)[:, :vocab]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """32-bit words in int64, of shapes that broadcast."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        upper, lower = c * MULTIPLIERS[1], a * MULTIPLIERS[0]  # modulo 2^64; the sign is cut off below
        a, b = (upper >> 32 & LOW) ^ b ^ first, upper & LOW
        c, d = (lower >> 32 & LOW) ^ d ^ second, lower & LOW
        first, second = first + KEY_STEPS[0] & LOW, second + KEY_STEPS[1] & LOW
    return a, b, c, d
