"""Draws by random scores: numbers, what is kept, and how often each token is drawn."""

import math

import numpy as np
import pytest
import torch
from draws import OFF, apart, columns, normal_logits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from published_models import OTHERS, OURS

from engine.runner.sampling import philox
from kernels import ops
from kernels.reference import sampling
from kernels.reference.sampling import draw, exponential, keep, log2, philox4x32, random_words, weights

FULL = 0xFFFFFFFF
ONE = 2.0 ** (24 + sampling.POINT)
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


# ------------------------------------------------------------------ numbers
def test_known_answers():
    counters, keys, answers = (torch.tensor(part) for part in zip(*KNOWN, strict=True))
    assert torch.stack(philox4x32(counters.unbind(1), keys.unbind(1)), dim=1).tolist() == answers.tolist()


def test_each_token_has_a_word_of_the_generator_that_other_draws_use():
    """The seed is the key, and (position, its upper half, choice, 1 + token / 4) the counter."""
    seeds, choices, positions = [-5, 2**40 + 1], [3, FULL], [7, 2**33 + 1]
    found = random_words(10, *(torch.tensor(each)[:, None] for each in (seeds, choices, positions)))
    for row, (seed, choice, position) in enumerate(zip(seeds, choices, positions, strict=True)):
        for token in range(10):
            counter = [position & FULL, position >> 32, choice, 1 + token // 4]
            key = [seed & FULL, seed % 2**64 >> 32]
            words = philox.philox4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
            assert found[row, token] == int(words[token % 4, 0])


def test_logarithms():
    x = torch.cat([torch.linspace(0.5, 2.0, 30001), torch.tensor([2.0**-126, 1.0, 2.0**-32, 33.0, 3e38])])
    exact = x.double().log2()
    assert ((log2(x) - exact).abs() <= 1e-6 + 1e-6 * exact.abs()).all()
    assert log2(torch.tensor([1.0, 0.25, 8.0])).tolist() == [0.0, -2.0, 3.0]


def test_exponential_numbers_are_precise_on_both_sides():
    words = torch.cat([torch.arange(3000), torch.arange(0, FULL, 2**16 + 1), FULL - torch.arange(3000)])
    exact = -torch.log1p(-((FULL - words).double() + 0.5) * 2.0**-32) / math.log(2)
    found = exponential(words)
    assert found.dtype == torch.float32
    assert ((found / exact - 1).abs() < 2e-6).all()
    assert 0 < found.min() < 2.0**-32 and found.max() < 33.01
    assert (exponential(FULL - torch.arange(2**20)).diff() > 0).all()  # so that few of the smallest are equal


def test_weights_are_whole_numbers():
    t = torch.cat([-torch.linspace(0, 44, 20001), torch.tensor([-59.0, -60.0, -61.0, -1e30])])
    exact = t.double().exp2() * ONE
    assert ((weights(t) - exact).abs() <= 1 + 1e-6 * exact).all()
    assert weights(torch.tensor([0.0, -1.0, -43.0, -44.0, -1e30])).tolist() == [2**43, 2**42, 1, 0, 0]


def test_weights_of_the_largest_vocabulary_have_a_sum():
    even = weights(torch.zeros(1)).expand(ops.LARGEST_VOCABULARY)
    assert even.sum() == even.cumsum(0)[-1] == ops.LARGEST_VOCABULARY * 2**43 < 2**63


def test_published_models_have_no_larger_vocabulary():
    for name, config in {**OURS, **OTHERS}.items():
        assert config["vocab_size"] <= ops.LARGEST_VOCABULARY, name


# ------------------------------------------------------------------ what is kept
def kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float, temperature: float = 1.0) -> set[int]:
    t = (logits - logits.max()) * (sampling.LOG2_E / temperature)
    limits = torch.tensor([[top_k]]), torch.tensor([[top_p]]), torch.tensor([[min_p]])
    return set(keep(logits[None], t[None], *limits)[0].nonzero().flatten().tolist())


def plain(logits: list[float], top_k: int, top_p: float, min_p: float) -> tuple[list[int], float]:
    """What stays, most naively, and by how much the decisions missed their opposites."""
    weight = [math.exp(value - max(logits)) for value in logits]
    order = sorted((token for token in range(len(logits)) if weight[token]), key=lambda t: (-weight[t], t))
    order, margin = order[:top_k] if top_k else order, 1.0
    if top_p < 1.0:
        share, before, nucleus = top_p * sum(weight[token] for token in order), 0.0, []
        for token in order:
            margin = min(margin, abs(before - share))
            if not nucleus or before < share:
                nucleus.append(token)
            before += weight[token]
        order = nucleus
    margin = min([margin, *(abs(weight[token] / min_p - 1) for token in order if min_p)])
    return [token for token in order if weight[token] >= min_p], margin


TIED_ROWS = st.lists(st.sampled_from([-math.inf, -4.0, -1.0, -0.0, 0.0, 0.5, 2.0, 3.0]), min_size=2, max_size=150)
TOP_K, TOP_P, MIN_P = [0, 1, 2, 5, 64, 200], [1.0, 0.99, 0.7, 0.2, 1e-9], [0.0, 0.05, 0.5]
LIMITS = st.tuples(*(st.sampled_from(each) for each in (TOP_K, TOP_P, MIN_P)))


@settings(max_examples=200, deadline=None)
@given(TIED_ROWS, LIMITS)
def test_what_plain_code_keeps_is_kept(values, limits):
    assume(max(values) > -math.inf)
    expected, margin = plain(values, *limits)
    assume(margin > 1e-5)
    assert kept(torch.tensor(values), *limits) == set(expected)


@pytest.mark.parametrize("limits", [(0, 0.9, 0.0), (50, 0.9, 0.0), (900, 1.0, 0.01), (0, 0.99, 1e-3), (7, 1.0, 0.0)])
def test_limits_cut_the_order_after_temperature(limits):
    logits = normal_logits(1, 3000, 2.0)[0]
    expected, margin = plain((logits.double() / 0.7).tolist(), *limits)
    assert margin > 1e-6 and kept(logits, *limits, temperature=0.7) == set(expected)


def test_min_p_of_one_keeps_the_first_and_its_equals():
    assert kept(torch.tensor([1.0, 3.0, 2.999999, 3.0]), 0, 1.0, 1.0) == {1, 3}


def test_the_share_of_top_p_is_reached_exactly():
    """Weights and their sums are whole, so halves are."""
    assert kept(torch.zeros(4), 0, 0.5, 0.0) == {0, 1}
    assert kept(torch.zeros(4), 3, 0.5, 0.0) == {0, 1}
    assert kept(torch.tensor([0.0, 1.0, 1.0]), 0, 0.0, 0.0) == {1}


# ------------------------------------------------------------------ tokens
def test_no_temperature_is_the_first_of_the_maximum():
    logits = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -0.0, 0.0], [-math.inf, -7.0, -math.inf], [3e38, -3e38, 3e38]])
    for temperature in (0.0, 9e-6):
        arguments = columns(4, [(0, 1.0, 0.0), (2, 0.5, 0.1)], [temperature])
        assert draw(logits, *arguments).tolist() == [1, 1, 1, 0]


def test_rows_that_are_not_finite_have_no_token():
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[0.0, nan, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0], [-inf, 1.0, -inf], [nan, nan, inf]])
    for temperature in (0.0, 1.0):
        for limits in (OFF, (2, 0.9, 0.1)):
            assert draw(logits, *columns(5, [limits], [temperature])).tolist() == [-1, -1, -1, 1, -1]


def test_what_has_no_chance_is_not_drawn():
    logits = torch.full((500, 9), -math.inf)
    logits[:, 4], logits[:, 7] = 0.0, -1e30
    assert set(draw(logits, *columns(500, [OFF, (5, 1.0, 0.0), (0, 0.999, 0.0)])).tolist()) == {4}


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """By how many standard deviations the statistic is beyond its mean."""
    possible = chances > 0
    assert not counts[~possible].any()
    expected = chances[possible] * counts.sum()
    freedom = int(possible.sum()) - 1
    return (float(((counts[possible] - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


DRAWS = 40000


@pytest.mark.parametrize("varied", ["seeds", "positions", "choices"])
def test_tokens_are_drawn_as_often_as_they_are_likely(varied):
    logits = normal_logits(1, 30, 1.5, seed=1)[0]
    numbers = {"seeds": torch.full((DRAWS,), 11), varied: torch.arange(DRAWS)}
    counts = draw(logits.expand(DRAWS, 30), *columns(DRAWS, [OFF], [0.8], **numbers)).bincount(minlength=30).double()
    assert abs(chi_square(counts, (logits.double() / 0.8).softmax(0))) < 4


def test_tokens_are_drawn_as_often_wherever_they_are_in_the_vocabulary():
    count, places = 15000, torch.randperm(200, generator=torch.Generator().manual_seed(2))[:30]
    row = torch.full((200,), -math.inf)
    row[places] = normal_logits(1, 30, 1.5, seed=1)[0]
    counts = draw(row.expand(count, 200), *columns(count, [OFF])).bincount(minlength=200).double()
    assert abs(chi_square(counts, row.double().softmax(0))) < 4


@pytest.mark.parametrize("limits", [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (12, 0.9, 0.05)])
def test_tokens_that_are_kept_are_drawn_as_often_as_they_are_likely(limits):
    logits = normal_logits(1, 30, 1.5, seed=3)[0]
    stay = torch.zeros(30, dtype=torch.bool)
    stay[plain(logits.double().tolist(), *limits)[0]] = True
    assert 2 < stay.sum() < 30
    counts = draw(logits.expand(DRAWS, 30), *columns(DRAWS, [limits])).bincount(minlength=30).double()
    assert abs(chi_square(counts, logits.double().masked_fill(~stay, -math.inf).softmax(0))) < 4


def test_a_row_draws_the_same_in_any_company_at_any_stride(monkeypatch):
    logits = normal_logits(12, 700, 2.0, seed=5)
    arguments = columns(12, [OFF, (20, 0.9, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2)], [1.0, 0.7, 0.0])
    together = draw(apart(logits), *arguments)
    one_by_one = [draw(logits[i : i + 1], *(each[i : i + 1] for each in arguments)).item() for i in range(12)]
    assert together.tolist() == one_by_one
    monkeypatch.setattr(sampling, "NUMBERS", 3 * 700)
    assert torch.equal(draw(logits, *arguments), together)
    assert draw(logits[:0], *(each[:0] for each in arguments)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_other_dtypes_are_widened(dtype):
    logits = normal_logits(8, 300, 2.0).to(dtype)
    arguments = columns(8, [OFF, (20, 0.9, 0.0)])
    assert torch.equal(draw(logits, *arguments), draw(logits.float(), *arguments))


def test_contracts():
    logits = normal_logits(3, 40)
    good = columns(3, [(4, 0.9, 0.1)])
    assert torch.equal(ops.draw(apart(logits), *good), draw(logits, *good))
    for place, column in enumerate(good):
        other = column.half() if column.is_floating_point() else column.short()
        for bad in (other, column[:2], column.repeat_interleave(2)[::2]):
            with pytest.raises(AssertionError):
                ops.draw(logits, *good[:place], bad, *good[place + 1 :])
    too_many = torch.zeros(3, ops.LARGEST_VOCABULARY + 1)
    for bad_logits in (logits.t().contiguous().t(), logits.long(), logits[:, :0], too_many):
        with pytest.raises(AssertionError):
            ops.draw(bad_logits, *good)
