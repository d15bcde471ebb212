"""Log-probabilities: those of the raw logits, ranks, and what is not finite (A20)."""

import math

import numpy as np
import pytest
import torch
from sampling_rows import INF, Row, random_logits, sample

from engine.runner.sampling.distribution import largest
from engine.runner.sampling.logprobs import token_logprobs
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype):
    params = SamplingParams(
        temperature=0.5, top_k=2, repetition_penalty=1.5, logit_bias={3: 50.0, 8: 49.0}, logprobs=5, seed=0
    )
    row = Row(random_logits(1000, 12, dtype=dtype), params, prompt=[3, 8])
    result = sample([row])
    token, found = int(result.token_ids[0]), result.logprobs[0]
    assert token in (3, 8)
    expected = torch.log_softmax(row.logits.double(), dim=0)
    order = np.lexsort((np.arange(1000), -row.logits.double().numpy()))
    assert found.logprob == pytest.approx(expected[token].item(), abs=2e-6)
    assert found.rank == order.tolist().index(token) + 1
    assert found.top_ids == order[:5].tolist()
    assert found.top_logprobs == pytest.approx(expected[order[:5].copy()].tolist(), abs=2e-6)


def test_the_rank_of_equals_is_by_id():
    logits = torch.zeros(40)
    logits[[6, 20, 31]] = torch.tensor([3.0, 4.0, 4.0])
    row = Row(logits, SamplingParams(temperature=0.0, logit_bias={31: 1.0}, logprobs=2))
    result = sample([row])
    assert result.token_ids[0] == 31 and result.logprobs[0].rank == 2 and result.logprobs[0].top_ids == [20, 31]


def test_logprobs_only_for_rows_that_ask_and_as_many_as_they_ask():
    params = [None, 0, 20, 1, None]
    rows = [
        Row(random_logits(100, seed), SamplingParams(temperature=0.0, logprobs=asked))
        for seed, asked in enumerate(params)
    ]
    found = sample(rows).logprobs
    assert sorted(found) == [1, 2, 3]
    assert [len(found[place].top_ids) for place in (1, 2, 3)] == [0, 20, 1]
    assert all(one.rank == 1 for one in found.values())


def test_a20_minus_infinity_becomes_a_number():
    logits = random_logits(40, 13)
    logits[7] = -INF
    params = SamplingParams(temperature=0.0, allowed_token_ids=(7, 8), logit_bias={8: -100.0}, logprobs=2)
    result = sample([Row(logits, params)])
    assert result.token_ids[0] == 8 and math.isfinite(result.logprobs[0].logprob)
    x = torch.full((1, 64), -INF)
    x[0, :40] = logits
    found = token_logprobs(x, torch.empty(2, 1, 64), np.array([7]), np.array([2]))[0]
    assert found.logprob == -9999.0 and found.rank == 40


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 600])
def test_largest_are_ordered_with_the_lower_id_first(count):
    x = random_logits(1024, 7, dtype=torch.bfloat16).float().numpy()  # bf16: many equal numbers
    x[[5, 900]] = 0.0
    x[[3, 901]] = -0.0
    x[100:120] = -INF
    expected = np.lexsort((np.arange(1024), -x))[:count]
    assert largest(x, x.reshape(64, -1).max(axis=0), count).tolist() == expected.tolist()


def test_largest_leaves_out_what_is_not_finite():
    x = np.full(64, -INF, np.float32)
    x[[9, 4]] = [1.0, 2.0]
    assert largest(x, x.reshape(64, -1).max(axis=0), 5).tolist() == [4, 9]
