"""Draws and orders over the vocabulary whose result for a row never depends on other rows or on threads.

Torch's reductions over a row may split it among threads; maxima and numpy's cumulative sums along a row cannot. A row
of `width` = LANES x G weights comes with G sums (`kernels.ops.softmax_weights`): sum g of tokens g, g + G, g + 2 G, …
"""

import numpy as np
import numpy.typing as npt

from kernels.ops import LANES

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

BELOW_ONE = 1.0 - 2.0**-53
LOWEST = float(np.finfo(np.float32).min)


def padded(vocab_size: int) -> int:
    """The width of a row: whole groups. What lies beyond the vocabulary is -inf in logits, 0 in weights."""
    return -(-vocab_size // LANES) * LANES


def draw(weights: F32, cumulative: F64, uniform: F64) -> Ids:
    """Inverts each row's distribution: the token where the cumulative weight first exceeds uniform x total.

    weights: [R, LANES x G]; cumulative: [R, G] of its group sums, all totals positive; uniform: [R] in [0, 1), at most
    52 bits. First the group is drawn, then the token within it, in float64. A token of weight 0 is never drawn.
    """
    rows = np.arange(len(weights))
    target = uniform * cumulative[:, -1]
    group = (cumulative <= target[:, None]).sum(axis=1)
    before = np.where(group > 0, cumulative[rows, group - 1], 0.0)
    share = np.minimum((target - before) / (cumulative[rows, group] - before), BELOW_ONE)  # it may round to 1
    members = weights.reshape(len(weights), LANES, -1)[rows, :, group].cumsum(axis=1, dtype=np.float64)
    # share is below 1, by 2^-53 at least, so the product is below the last member after rounding too.
    lane = (members <= (share * members[:, -1])[:, None]).sum(axis=1)
    token: Ids = lane * cumulative.shape[1] + group
    return token


def floor_of(x: F32, group_max: F32, count: int) -> float:
    """A number that at least `count` numbers of a row reach, and few more: the count-th largest group maximum.

    x: [LANES x G]; group_max: [G]. With more numbers than groups: the count-th largest number itself.
    """
    values = group_max if count <= len(group_max) else x
    return float(np.partition(values, len(values) - count)[len(values) - count])


def at_least(x: F32, floor: float) -> Ids:
    """Ids of the finite numbers of a row that reach `floor`, descending; of equal ones the lower id first."""
    ids = np.flatnonzero(x >= np.float32(max(floor, LOWEST)))
    # One integer a number: its bits, made to sort as it does (-0.0 as 0.0), inverted, then the id. Sorts fast.
    bits = (x[ids] + np.float32(0.0)).view(np.int32).astype(np.int64)
    keys = (~(bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | ids
    keys.sort()
    order: Ids = keys & 0xFFFFFFFF
    return order


def largest(x: F32, group_max: F32, count: int) -> Ids:
    """The first `count` ids of that order over the whole row, fewer where fewer are finite."""
    return at_least(x, floor_of(x, group_max, count))[:count]
