"""Random draws: a true sample of the reference's distribution, never a token without weight, and keyed by seed, choice
and position (A40)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import EOS, Row, random_logits, reference_distribution, sampler_for, token_of

from engine.messages import NewRow
from engine.runner.request_rows import RequestRows
from engine.runner.sampling.distribution import draw
from engine.runner.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from kernels.reference.softmax import group_sums


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The statistic, as a standard normal number (Wilson and Hilferty 1931). Rare tokens are counted together."""
    expected = probabilities * counts.sum()
    common = expected >= 8
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


CASES = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vary", ["seed", "position", "index"])
def test_draws_are_a_true_sample(name, vary):
    vocab_size, rounds, batch = 150, 10, 1000
    logits = random_logits(vocab_size, 8, 1.5)
    counts = np.zeros(vocab_size, np.int64)
    shared = SamplingParams(seed=99, **CASES[name])
    for start in range(0, rounds * batch, batch):
        rows = RequestRows(batch, rounds * batch + 1 if vary == "position" else 1, 16)
        sampler = Sampler(rows, vocab_size, EOS)
        for slot in range(batch):
            number = start + slot
            params = SamplingParams(seed=number, **CASES[name]) if vary == "seed" else shared
            index = number if vary == "index" else 0
            sampler.columns.admit(NewRow(slot, "r", [1], 1, params, index, [[]], 0))
            rows.lengths[slot] = number if vary == "position" else 1
        tokens = sampler.sample(logits.expand(batch, -1), np.arange(batch)).token_ids
        counts += np.bincount(tokens, minlength=vocab_size)
    expected = np.array(reference_distribution(Row(logits, SamplingParams(**CASES[name]))))
    assert counts[expected == 0].sum() == 0
    assert abs(chi_square(counts, expected)) < 4
    wrong = np.array(reference_distribution(Row(logits * 1.15, SamplingParams(**CASES[name]))))
    assert counts[wrong == 0].any() or chi_square(counts, wrong) > 4  # the test can fail


def test_a_draw_inverts_the_distribution():
    """Uniform numbers on a fine grid: each token gets its share of them, none beyond rounding."""
    weights = np.zeros((1, 192), np.float32)
    weights[0, :150] = np.exp(random_logits(150, 9).numpy())
    weights[0, 40:60] = 0.0
    sums = group_sums(torch.from_numpy(weights)).numpy().cumsum(axis=1, dtype=np.float64)
    count = 100_000
    uniform = (np.arange(count) + 0.5) / count
    tokens = draw(weights.repeat(count, axis=0), sums.repeat(count, axis=0), uniform)
    shares = np.bincount(tokens, minlength=192) / count
    assert np.abs(shares - weights[0] / weights.sum()).max() < 2 / count
    assert shares[40:60].sum() == shares[150:].sum() == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2**24), min_size=2, max_size=3), st.integers(0, 2**52 - 1))
def test_a_draw_at_the_edge_of_a_group_stays_in_it(sums, bits):
    """Uniform numbers right below and at the groups' borders: rounding never leads out of the row."""
    weights = np.zeros((1, 64, len(sums)), np.float32)
    weights[0, 40, :] = np.array(sums) / 3e7
    cumulative = weights[0, 40:41].cumsum(axis=1, dtype=np.float64)
    borders = np.floor(cumulative[0] / cumulative[0, -1] * 2.0**52)
    grid = np.minimum([*borders, *(borders - 1), bits], 2.0**52 - 1) * 2.0**-52
    rows = len(grid)
    tokens = draw(weights.reshape(1, -1).repeat(rows, axis=0), cumulative.repeat(rows, axis=0), grid)
    assert set(tokens.tolist()) <= {40 * len(sums) + group for group in range(len(sums))}


def test_a_draw_next_to_the_end_of_a_group_stays_in_it():
    """Where what is left of the group's share rounds to all of it."""
    rounded = 0
    for a, b in zip(np.linspace(2.0**-30, 2.0**-28, 64), 1 + np.arange(64) * 2.0**-13, strict=True):
        weights = np.zeros((1, 128), np.float32)
        weights[0, :2] = a, b
        cumulative = weights[:, :2].cumsum(axis=1, dtype=np.float64)
        before, total = cumulative[0]
        rounded += ((1 - 2.0**-52) * total - before) / (total - before) >= 1
        assert draw(weights, cumulative, np.array([1 - 2.0**-52])) == [1]
    assert rounded, "no such case"


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_weight():
    weights = np.zeros((2, 128), np.float32)
    weights[:, [17, 100]] = [[1.0, 3.0], [1e-30, 1e-38]]
    sums = group_sums(torch.from_numpy(weights)).numpy().cumsum(axis=1, dtype=np.float64)
    for end in (0.0, 1.0 - 2.0**-52):
        assert set(draw(weights, sums, np.full(2, end)).tolist()) <= {17, 100}


def test_a40_seed_choice_and_position_key_the_draw():
    logits = random_logits(500, 10, 0.1)
    tokens = {
        name: [
            token_of(Row(logits, SamplingParams(seed=seed), output=[1] * length, index=index))
            for length in range(shift, 30 + shift)
        ]
        for name, seed, index, shift in (("a", 5, 0, 0), ("b", 5, 0, 0), ("c", 6, 0, 0), ("d", 5, 1, 0), ("e", 5, 0, 1))
    }
    assert tokens["a"] == tokens["b"]
    assert len({tuple(each) for each in tokens.values()}) == 4
    assert tokens["e"][:-1] == tokens["a"][1:]
    # What was generated may as well be the prompt.
    moved = Row(logits, SamplingParams(seed=5), prompt=[1] * 4)
    assert token_of(moved) == tokens["a"][3]


def test_without_a_seed_requests_differ_and_a_resumed_one_goes_on_as_before():
    logits = random_logits(4000, 11, 0.1)
    first = Row(logits, request_id="one", prompt=[1, 2], output=[3])
    other = Row(logits, request_id="two", prompt=[1, 2], output=[3])
    sampler = sampler_for([first, other], [0, 1])
    both = sampler.sample(logits.expand(2, -1), np.array([0, 1])).token_ids
    assert both[0] != both[1]
    again = NewRow(7, "one", [1, 2, 3], 2, SamplingParams(), 0, [[]], 0)
    sampler.columns.release(0)
    sampler.rows.admit(again, 4000)
    sampler.columns.admit(again)
    assert sampler.sample(logits[None], np.array([7])).token_ids[0] == both[0]
    # Another server would draw otherwise.
    assert sampler_for([first], [0]).sample(logits[None], np.array([0])).token_ids[0] != both[0]
