"""Random numbers without state: a function of (seed, choice index, position), so company and history cannot matter.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The test
checks the authors' known answers.
"""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: U64, key: U64, rounds: int = 10) -> U64:
    """counter: [4, N], key: [2, N], 32-bit words held in uint64 -> [4, N] 32-bit words."""
    multiplied, other = counter[0::2], counter[1::2]
    for _ in range(rounds):
        product = multiplied * _MULTIPLIERS
        multiplied = (product[::-1] >> _HALF) ^ other ^ key
        other = product[::-1] & _LOW
        key = (key + _KEY_STEPS) & _LOW
    return np.stack([multiplied[0], other[0], multiplied[1], other[1]])


def uniforms(seeds: U64, indices: U64, positions: U64) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) of 52 bits for each row: [N].

    seeds: 64 bits, the key; choice indices (32 bits) and absolute positions of the token to draw: the counter. With an
    absolute position, a prompt that repeats what was generated so far goes on with the same numbers.
    52 bits: u x total is then below total in float64, whatever the total.
    """
    counter = np.stack([positions & _LOW, positions >> _HALF, indices, np.zeros_like(indices)])
    words = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _HALF]))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    result: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-52
    return result
