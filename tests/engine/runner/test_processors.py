"""Biases, bans, grammar masks and penalties against a plain per-row reference, and the counts that penalties go by."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sampling_rows import (
    Row,
    constrained_rows,
    processed,
    random_logits,
    reference_logits,
    sample,
    sampler_for,
    token_of,
)

from engine.sampling_params import SamplingParams


def test_logit_bias():
    logits = random_logits(50, 1)
    assert token_of(Row(logits, SamplingParams(temperature=0.0, logit_bias={7: 100.0}))) == 7
    best = int(logits.argmax())
    assert token_of(Row(logits, SamplingParams(temperature=0.0, logit_bias={best: -100.0}))) != best


def test_allowed_token_ids():
    logits = random_logits(50, 2)
    assert token_of(Row(logits, SamplingParams(temperature=0.0, allowed_token_ids=(3, 9)))) == max(
        (3, 9), key=lambda token: logits[token]
    )


def test_bad_words_of_one_and_of_several_tokens():
    logits = torch.zeros(20)
    logits[[4, 6]] = torch.tensor([5.0, 4.0])
    greedy = {"temperature": 0.0}
    assert token_of(Row(logits, SamplingParams(**greedy, bad_words=((4,),)))) == 6
    word = SamplingParams(**greedy, bad_words=((8, 9, 4),))
    assert token_of(Row(logits, word, output=[8, 9])) == 6
    assert token_of(Row(logits, word, output=[7, 8, 9])) == 6
    assert token_of(Row(logits, word, output=[9, 8])) == 4
    assert token_of(Row(logits, word, output=[9])) == 4
    assert token_of(Row(logits, word, prompt=[1, 8, 9])) == 4  # the prompt is no part of what is generated
    assert token_of(Row(logits, SamplingParams(**greedy, bad_words=((8, 4), (9, 4))), output=[8])) == 6


def test_min_tokens_holds_back_every_stop():
    logits = torch.zeros(20)
    logits[[2, 5, 11, 13]] = torch.tensor([9.0, 8.0, 7.0, 1.0])
    base = {"temperature": 0.0, "stop_token_ids": (11,), "min_tokens": 2}
    assert token_of(Row(logits, SamplingParams(**base), output=[4])) == 13
    assert token_of(Row(logits, SamplingParams(**base), output=[4, 4])) == 2
    assert token_of(Row(logits, SamplingParams(**base, ignore_eos=True), output=[4])) == 2


@settings(max_examples=100, deadline=None)
@given(constrained_rows())
def test_processors_do_what_the_reference_does(row):
    np.testing.assert_allclose(processed(row), np.array(reference_logits(row)), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ grammar masks
def bit_mask(allowed: set[int], vocab_size: int, signed: bool = True) -> list[int]:
    words = [0] * -(-vocab_size // 32)
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    return [word - 2**32 if signed and word >= 2**31 else word for word in words]


@pytest.mark.parametrize("signed", [True, False])
def test_grammar_masks(signed):
    logits = random_logits(70, 3)
    for allowed in ({31}, {0, 32, 69}, {33, 63, 64}):
        expected = max(allowed, key=lambda token: logits[token])
        assert token_of(Row(logits, SamplingParams(temperature=0.0)), bit_mask(allowed, 70, signed)) == expected
    # Tokens beyond a mask that is too short are not allowed.
    assert token_of(Row(logits, SamplingParams(temperature=0.0)), bit_mask({3, 5}, 32)) in (3, 5)


def test_masks_reach_their_slot_only():
    rows = [Row(random_logits(70, seed), SamplingParams(temperature=0.0)) for seed in range(3)]
    result = sample(rows, [5, 9, 2], {9: bit_mask({44}, 70)})
    assert result.token_ids.tolist() == [int(rows[0].logits.argmax()), 44, int(rows[2].logits.argmax())]


# ------------------------------------------------------------------ penalties
def test_repetition_penalty_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    logits = random_logits(60, 4)
    prompt, output = [3, 4, 5, 5], [6, 7, 7]
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty=1.7)(
        torch.tensor([prompt + output]), logits[None].clone()
    )[0]
    row = Row(logits, SamplingParams(repetition_penalty=1.7), prompt=prompt, output=output)
    np.testing.assert_allclose(processed(row), expected.numpy(), rtol=1e-6)


def test_a_resumed_sequence_counts_its_output_again():
    output = [7, 7, 9, 7]
    row = Row(random_logits(30, 4), SamplingParams(frequency_penalty=0.5), prompt=[9, 3], output=output)
    counts = sampler_for([row], [0]).columns.extras[0].counts
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {3: 0, 7: 3, 9: 1}
    np.testing.assert_allclose(processed(row), np.array(reference_logits(row)), rtol=1e-6)


def test_counts_follow_what_is_drawn():
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.25, repetition_penalty=1.5)
    row = Row(torch.tensor([3.0, 2.9, 0.5, 0.4]), params, prompt=[0])
    sampler = sampler_for([row], [3])
    for _ in range(40):
        drawn = sampler.sample(row.logits[None], np.array([3])).token_ids
        assert drawn[0] == np.argmax(reference_logits(row))
        row.output.append(int(drawn[0]))
        sampler.rows.append_tokens(np.array([3]), drawn)
        sampler.columns.record([3], drawn.tolist())
    assert len(set(row.output)) == 4
    counts = sampler.columns.extras[3].counts
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(row.output)


def test_counts_grow_beyond_their_first_size():
    row = Row(random_logits(500, 5), SamplingParams(presence_penalty=1.0), prompt=[1, 1, 2])
    columns = sampler_for([row], [0]).columns
    drawn = [(7 * step) % 450 for step in range(900)]
    for each in drawn:
        columns.record([0], [each])
    counts = columns.extras[0].counts
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == Counter(drawn)
