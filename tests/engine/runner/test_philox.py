"""Philox4x32-10 against its authors' known answers, and the uniforms made of it."""

import numpy as np
import pytest

from engine.runner.sampling.philox import philox4x32, uniforms

FULL = 0xFFFFFFFF
# kat_vectors of Random123 (D. E. Shaw Research), philox 4x32 10: counter, key, answer
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    assert philox4x32(words(*counter)[:, None], words(*key)[:, None])[:, 0].tolist() == list(answer)


def test_columns_do_not_mix():
    counters, keys = (np.stack([words(*vector[part]) for vector in KNOWN], axis=1) for part in (0, 1))
    assert philox4x32(counters, keys).T.tolist() == [list(vector[2]) for vector in KNOWN]


def test_uniforms_lie_in_the_unit_interval_and_depend_on_every_part_of_the_key():
    base = {"seeds": words(7), "indices": words(0), "positions": words(100)}
    reference = uniforms(**base)[0]
    for change in (
        {"seeds": words(8)},
        {"seeds": words(7 + 2**32)},
        {"indices": words(1)},
        {"positions": words(101)},
        {"positions": words(100 + 2**32)},
    ):
        assert uniforms(**(base | change))[0] != reference
    many = uniforms(np.full(20_000, 3, np.uint64), np.zeros(20_000, np.uint64), np.arange(20_000, dtype=np.uint64))
    assert many.min() >= 0.0 and many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


def test_52_bits_keep_a_draw_below_its_total():
    largest = float(np.float64(2**52 - 1) * 2.0**-52)
    for total in (1.0, np.nextafter(2.0, 0.0), 2.0, 3.3, 49152.0, 1e-300):
        assert largest * total < total
