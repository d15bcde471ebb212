"""Top-k, then top-p, then min-p: which tokens of a row stay in the draw. Only likely tokens are ever sorted."""

import math

import numpy as np

from engine.runner.sampling.distribution import F32, F64, Ids, at_least, floor_of, largest

SLACK = 1e-3
"""How far min-p's floor in fp32 logits lies below the exact one, so that rounding loses no token."""


FIRST_LOOK = 64
"""Likely tokens among which a nucleus is sought first; eight times as many each time it proves larger."""


def truncate(x: F32, group_max: F32, total: float, limits: tuple[int, float, float]) -> tuple[Ids, F64]:
    """Tokens that stay, most likely first, and their weights exp(x).

    x: [width], logits over temperature, shifted to a maximum of 0; total: the sum of exp(x); limits: top_k (0: off),
    top_p (1: off), min_p (0: off), not all off.

    top-k keeps exactly k tokens, the lower ids of equals. top-p (Holtzman et al. 2020) keeps the fewest of the most
    likely tokens that together reach p of what top-k left. min-p (Nguyen et al. 2024) keeps tokens at least min_p times
    as likely as the likeliest.
    """
    top_k, top_p, min_p = limits
    if top_k:
        ids = largest(x, group_max, top_k)
    elif top_p < 1.0:
        ids = _nucleus(x, group_max, top_p * total)
    else:
        ids = at_least(x, math.log(min_p) - SLACK)
    weights: F64 = np.exp(x[ids].astype(np.float64))
    if top_p < 1.0:
        mass = weights.cumsum()
        weights = weights[: int(np.searchsorted(mass, top_p * (mass[-1] if top_k else total))) + 1]
    if min_p > 0.0:
        weights = weights[: int(np.searchsorted(-weights, -min_p, side="right"))]
    return ids[: len(weights)], weights


def _nucleus(x: F32, group_max: F32, mass: float) -> Ids:
    """The most likely tokens, at least as many as together weigh `mass`."""
    count = FIRST_LOOK
    while count < len(x):
        ids = at_least(x, floor_of(x, group_max, count))
        if np.exp(x[ids].astype(np.float64)).sum() >= mass:
            return ids
        count *= 8
    return at_least(x, -math.inf)


def draw_truncated(ids: Ids, weights: F64, uniform: float) -> int:
    """Inverts the distribution of `truncate`."""
    cumulative = weights.cumsum()
    return int(ids[int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))])
