"""The sampler as a whole: greedy rows, a row alone against the same row in company, bit for bit, and rows that fail."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import INF, Row, constrained_rows, outcome, random_logits, sample, sampler_for, token_of

from engine.errors import InvalidRequest
from engine.messages import NewRow
from engine.runner.sampling.logprobs import token_logprobs
from engine.runner.sampling.sampler import NO_TOKEN_LEFT, NON_FINITE
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.threads import num_threads, set_threads


# ------------------------------------------------------------------ greedy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_of_equals(dtype):
    logits = torch.zeros(100, dtype=dtype)
    logits[[17, 40, 99]] = 2.0
    greedy = SamplingParams(temperature=0.0)
    assert token_of(Row(logits, greedy)) == 17
    assert token_of(Row(logits, SamplingParams(temperature=0.0, min_tokens=1))) == 17
    assert token_of(Row(logits, SamplingParams(temperature=1.0, top_k=1))) == 17
    assert token_of(Row(logits, SamplingParams(temperature=1.0, top_p=1e-9))) == 17
    assert token_of(Row(-logits, greedy)) == 0


def test_a_tiny_temperature_is_greedy():
    logits = random_logits(300, 0)
    assert token_of(Row(logits, SamplingParams(temperature=1e-9))) == int(logits.argmax())


# ------------------------------------------------------------------ company
@settings(max_examples=40, deadline=None)
@given(st.lists(constrained_rows(), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_a40_a_row_is_the_same_alone_and_in_company(rows, random):
    dtype = random.choice([torch.float32, torch.bfloat16])
    for row in rows:
        row.logits = row.logits.to(dtype)
    alone = [outcome(sample([row]), 0) for row in rows]
    slots = random.sample(range(64), len(rows))
    together = sample(rows, slots)
    assert [outcome(together, place) for place in range(len(rows))] == alone
    order = random.sample(range(len(rows)), len(rows))
    permuted = sample([rows[place] for place in order], [slots[place] for place in order])
    assert [outcome(permuted, order.index(place)) for place in range(len(rows))] == alone


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_a40_large_vocabularies_alone_and_in_company(vocab_size):
    """Across several chunks of scratch, for every kind of row."""
    kinds = [
        SamplingParams(temperature=0.0, logprobs=20),
        SamplingParams(seed=1, logprobs=5),
        SamplingParams(seed=2, top_p=0.9),
        SamplingParams(seed=3, top_k=50, temperature=1.7),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(seed=4, min_p=0.1, presence_penalty=0.5),
        SamplingParams(temperature=0.0),
    ]
    rows = [
        Row(random_logits(vocab_size, seed, dtype=torch.bfloat16), kinds[seed % len(kinds)], output=[4, 7, 7])
        for seed in range(33)
    ]
    alone = [outcome(sample([row]), 0) for row in rows]
    for count in (2, 7, 33):
        together = sample(rows[:count])
        assert [outcome(together, place) for place in range(count)] == alone[:count]


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_sums_do_not_depend_on_rows_or_threads(vocab_size):
    """The exponentials and the sums behind draws and log-probabilities, bit for bit."""
    x = torch.stack([random_logits(vocab_size, seed) for seed in range(33)])
    tokens, tops = np.arange(33), np.full(33, 3)

    def everything(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, list]:
        part = x[start:stop].clone()
        weights = torch.empty_like(part)
        sums = ops.softmax_weights(part, torch.ones(len(part)), torch.empty_like(part), weights)
        found = token_logprobs(part, torch.empty(2, *part.shape), tokens[start:stop], tops[start:stop])
        return weights, sums, found

    threads = num_threads()
    try:
        set_threads(1)
        weights, sums, found = everything(0, 33)
        set_threads(2)
        for start, count in ((0, 1), (6, 1), (32, 1), (0, 2), (21, 2), (1, 7), (0, 33)):
            some = everything(start, start + count)
            assert torch.equal(some[0], weights[start : start + count])
            assert torch.equal(some[1], sums[start : start + count])
            assert some[2] == found[start : start + count]
    finally:
        set_threads(threads)


# ------------------------------------------------------------------ faults
@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=1, top_p=0.5, logprobs=2)])
def test_non_finite_logits_fail_their_row_only(value, params):
    rows = [Row(random_logits(100, seed), params) for seed in range(4)]
    healthy = sample(rows)
    rows[2].logits = rows[2].logits.clone()
    rows[2].logits[60] = value
    result = sample(rows)
    assert result.faults == {2: NON_FINITE}
    assert [outcome(result, place) for place in (0, 1, 3)] == [outcome(healthy, place) for place in (0, 1, 3)]
    assert 2 not in result.logprobs


def test_all_minus_infinity_is_not_finite():
    assert sample([Row(torch.full((30,), -INF), SamplingParams(temperature=0.0))]).faults == {0: NON_FINITE}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_masked_fails_alone(temperature):
    params = SamplingParams(temperature=temperature, seed=0, allowed_token_ids=(3,), bad_words=((3,),))
    rows = [Row(random_logits(100, 0), params), Row(random_logits(100, 1), SamplingParams(temperature=0.0))]
    result = sample(rows)
    assert result.faults == {0: NO_TOKEN_LEFT}
    assert result.token_ids[1] == rows[1].logits.argmax()


def test_penalties_that_overflow_fail_their_row_only():
    extreme = SamplingParams(temperature=0.0, repetition_penalty=0.01)
    rows = [Row(torch.full((30,), 3e38), extreme), Row(random_logits(30, 1), SamplingParams(temperature=0.0))]
    result = sample(rows)
    assert result.faults == {0: NO_TOKEN_LEFT} and result.token_ids[1] == rows[1].logits.argmax()


def test_an_exception_in_one_row_fails_that_row_only():
    rows = [Row(random_logits(100, seed), SamplingParams(seed=seed, logprobs=1)) for seed in range(4)]
    healthy = sample(rows)
    result = sample(rows, masks={1: ["no mask"]})
    assert list(result.faults) == [1] and result.faults[1].startswith("Sampling failed")
    assert [outcome(result, place) for place in (0, 2, 3)] == [outcome(healthy, place) for place in (0, 2, 3)]


def test_token_ids_outside_the_vocabulary_are_refused_and_leave_a_plain_row():
    sampler = sampler_for([Row(random_logits(50, 0), SamplingParams(seed=1, logprobs=1, presence_penalty=1.0))], [0])
    for bad in ({"logit_bias": {50: 1.0}}, {"allowed_token_ids": (99,)}, {"bad_words": ((1, 50),)}):
        with pytest.raises(InvalidRequest):
            sampler.columns.admit(NewRow(0, "r", [1], 1, SamplingParams(**bad), 0, [], 0))
        assert sampler.columns.plain[0] and not sampler.columns.extras and sampler.columns.num_logprobs[0] == -1


def test_an_eos_id_beyond_the_logits_is_left_alone():
    assert token_of(Row(torch.tensor([0.0, 1.0, 3.0]), SamplingParams(temperature=0.0, min_tokens=1))) == 1
