"""Each sampling step against a plain per-row reference; a row alone against the same row in company, bit for bit."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.messages import NewRow
from engine.runner.request_rows import RequestRows
from engine.runner.sampling.distribution import draw, group_sums, largest, padded
from engine.runner.sampling.logprobs import token_logprobs
from engine.runner.sampling.sampler import NO_TOKEN_LEFT, NON_FINITE, Sampler
from engine.runner.sampling.truncation import draw_truncated, truncate
from engine.sampling_params import SamplingParams

EOS = (2, 5)
INF = math.inf


@dataclass
class Row:
    """A sequence to sample for, and its logits."""

    logits: torch.Tensor
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    index: int = 0
    request_id: str = "request"


def sampler_for(rows: list[Row], slots: list[int], max_num_seqs: int = 64) -> Sampler:
    vocab_size = rows[0].logits.shape[0]
    state = RequestRows(max_num_seqs, 128, 16)
    sampler = Sampler(state, vocab_size, EOS)
    for row, slot in zip(rows, slots, strict=True):
        new = NewRow(
            slot=slot,
            request_id=row.request_id,
            token_ids=row.prompt + row.output,
            num_prompt_tokens=len(row.prompt),
            params=row.params,
            index=row.index,
            block_ids=[],
            num_computed=0,
        )
        state.admit(new, vocab_size)
        sampler.columns.admit(new)
    return sampler


def sample(rows, slots=None, masks=None):
    slots = list(range(len(rows))) if slots is None else slots
    sampler = sampler_for(rows, slots)
    return sampler.sample(torch.stack([row.logits for row in rows]), np.array(slots), masks)


def token_of(row: Row, mask=None) -> int:
    result = sample([row], masks=None if mask is None else {0: mask})
    assert not result.faults
    return int(result.token_ids[0])


def reference_logits(row: Row) -> list[float]:
    """What the processors should make of a row: one token at a time, in float64."""
    p, n = row.params, row.logits.shape[0]
    x = [float(value) for value in row.logits.float()]
    for token in range(n):
        x[token] += (p.logit_bias or {}).get(token, 0.0)
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            x[token] = -INF
        for word in p.bad_words:
            prefix = list(word[:-1])
            if word[-1] == token and prefix == row.output[len(row.output) - len(prefix) :]:
                x[token] = -INF
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(EOS))
        if len(row.output) < p.min_tokens and token in stops:
            x[token] = -INF
        if token in row.prompt or token in row.output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        count = row.output.count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return x


def reference_distribution(row: Row) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, most naively."""
    p, x = row.params, reference_logits(row)
    weights = [math.exp((value - max(x)) / p.temperature) for value in x]
    order = sorted(range(len(x)), key=lambda token: (-weights[token], token))
    kept = order[: p.top_k] if p.top_k > 0 else order
    if p.top_p < 1.0:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token]
            if mass >= p.top_p * total:
                break
        kept = nucleus
    kept = [token for token in kept if weights[token] >= p.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(x))]


def random_logits(vocab_size: int, seed: int, scale: float = 3.0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


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


# ------------------------------------------------------------------ processors
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


def test_repetition_penalty_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    logits = random_logits(60, 4)
    prompt, output = [3, 4, 5, 5], [6, 7, 7]
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty=1.7)(
        torch.tensor([prompt + output]), logits[None].clone()
    )[0]
    row = Row(logits, SamplingParams(repetition_penalty=1.7), prompt=prompt, output=output)
    np.testing.assert_allclose(processed(row), expected.numpy(), rtol=1e-6)


def processed(row: Row) -> np.ndarray:
    """The row's logits after the processors, as the sampler has them."""
    sampler = sampler_for([row], [0])
    x = torch.full((1, padded(len(row.logits))), -INF)
    x[0, : len(row.logits)] = row.logits
    sampler._process(x, np.array([0]), {})
    return x[0, : len(row.logits)].numpy()


token = st.integers(0, 39)


@st.composite
def constrained_rows(draw_):
    options = {
        "temperature": draw_(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        "top_k": draw_(st.sampled_from([0, 0, 1, 3, 39, 40, 100])),
        "top_p": draw_(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])),
        "min_p": draw_(st.sampled_from([0.0, 0.0, 0.1, 0.7])),
        "repetition_penalty": draw_(st.sampled_from([1.0, 1.3, 0.8])),
        "presence_penalty": draw_(st.sampled_from([0.0, 0.5, -1.0])),
        "frequency_penalty": draw_(st.sampled_from([0.0, 0.3, -0.4])),
        "logit_bias": draw_(st.none() | st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.5]), max_size=4)),
        "bad_words": tuple(draw_(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3))),
        "stop_token_ids": tuple(draw_(st.lists(token, max_size=2))),
        "min_tokens": draw_(st.sampled_from([0, 0, 2, 4])),
        "ignore_eos": draw_(st.booleans()),
        "seed": draw_(st.integers(-(2**63), 2**63 - 1)),
        "logprobs": draw_(st.sampled_from([None, 0, 3])),
    }
    allowed = draw_(st.none() | st.lists(token, min_size=8, max_size=20, unique=True))
    return Row(
        random_logits(40, draw_(st.integers(0, 2**20)), dtype=draw_(st.sampled_from([torch.float32, torch.bfloat16]))),
        SamplingParams(**options, allowed_token_ids=None if allowed is None else tuple(allowed)),
        prompt=draw_(st.lists(token, min_size=1, max_size=6)),
        output=draw_(st.lists(token, max_size=6)),
        index=draw_(st.integers(0, 127)),
    )


@settings(max_examples=100, deadline=None)
@given(constrained_rows())
def test_processors_do_what_the_reference_does(row):
    np.testing.assert_allclose(processed(row), np.array(reference_logits(row)), rtol=1e-5, atol=1e-5)


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


# ------------------------------------------------------------------ top-k, top-p, min-p
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-4.0, -1.0, 0.0, 0.5, 0.5, 2.0, 3.0]), min_size=2, max_size=90),
    st.sampled_from([0, 1, 2, 5, 64, 80]),
    st.sampled_from([1.0, 0.99, 0.7, 0.2]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_truncation_keeps_what_the_reference_keeps(values, top_k, top_p, min_p):
    top_k = top_k if top_k < len(values) else 0
    if not (top_k or top_p < 1.0 or min_p):
        return
    logits = torch.tensor(values)
    expected = reference_distribution(Row(logits, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)))
    x = np.full(padded(len(values)), -INF, np.float32)
    x[: len(values)] = logits - logits.max()
    group_max = x.reshape(64, -1).max(axis=0)
    ids, weights = truncate(x, group_max, float(np.exp(x.astype(np.float64)).sum()), (top_k, top_p, min_p))
    found = np.zeros(len(values))
    found[ids] = weights / weights.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("vocab_size", [64, 1000, 9973])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_nucleus_of_flat_and_of_peaked_rows(vocab_size, scale):
    logits = random_logits(vocab_size, 6, scale)
    x = np.full(padded(vocab_size), -INF, np.float32)
    x[:vocab_size] = logits - logits.max()
    weights = np.exp(x.astype(np.float64))
    ids, _ = truncate(x, x.reshape(64, -1).max(axis=0), float(weights.sum()), (0, 0.9, 0.0))
    order = np.lexsort((np.arange(len(x)), -x))
    mass = weights[order].cumsum()
    assert ids.tolist() == order[: int((mass < 0.9 * weights.sum()).sum()) + 1].tolist()


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


# ------------------------------------------------------------------ draws
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
    for start in range(0, rounds * batch, batch):
        rows = RequestRows(batch, rounds * batch + 1, 16)
        sampler = Sampler(rows, vocab_size, EOS)
        for slot in range(batch):
            number = start + slot
            params = SamplingParams(seed=number if vary == "seed" else 99, **CASES[name])
            index = number if vary == "index" else 0
            sampler.columns.admit(NewRow(slot, "r", [1], 1, params, index, [], 0))
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
    sums = group_sums(torch.from_numpy(weights), torch.zeros(1, 192)).cumsum(axis=1, dtype=np.float64)
    count = 100_000
    uniform = (np.arange(count) + 0.5) / count
    tokens = draw(weights.repeat(count, axis=0), sums.repeat(count, axis=0), uniform)
    shares = np.bincount(tokens, minlength=192) / count
    assert np.abs(shares - weights[0] / weights.sum()).max() < 2 / count
    assert shares[40:60].sum() == shares[150:].sum() == 0


def test_a_truncated_draw_inverts_the_distribution():
    ids, weights = np.array([9, 4, 7, 30]), np.array([1.0, 0.75, 0.25, 0.25])
    count = 9000
    drawn = [draw_truncated(ids, weights, (place + 0.5) / count) for place in range(count)]
    assert Counter(drawn) == {9: 4000, 4: 3000, 7: 1000, 30: 1000}
    assert draw_truncated(ids, weights, 0.0) == 9 and draw_truncated(ids, weights, 1.0 - 2.0**-52) == 30


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


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_weight():
    weights = np.zeros((2, 128), np.float32)
    weights[:, [17, 100]] = [[1.0, 3.0], [1e-30, 1e-38]]
    sums = group_sums(torch.from_numpy(weights), torch.zeros(2, 128)).cumsum(axis=1, dtype=np.float64)
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
    again = NewRow(7, "one", [1, 2, 3], 2, SamplingParams(), 0, [], 0)
    sampler.columns.release(0)
    sampler.rows.admit(again, 4000)
    sampler.columns.admit(again)
    assert sampler.sample(logits[None], np.array([7])).token_ids[0] == both[0]
    # Another server would draw otherwise.
    assert sampler_for([first], [0]).sample(logits[None], np.array([0])).token_ids[0] != both[0]


# ------------------------------------------------------------------ company
def outcome(result, place):
    return int(result.token_ids[place]), result.logprobs.get(place), result.faults.get(place)


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
        weights = torch.exp(part - part.amax(dim=1, keepdim=True))
        sums = group_sums(weights, torch.empty_like(weights))
        found = token_logprobs(part, torch.empty(2, *part.shape), tokens[start:stop], tops[start:stop])
        return weights, torch.from_numpy(sums.copy()), found

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        weights, sums, found = everything(0, 33)
        torch.set_num_threads(2)
        for start, count in ((0, 1), (6, 1), (32, 1), (0, 2), (21, 2), (1, 7), (0, 33)):
            some = everything(start, start + count)
            assert torch.equal(some[0], weights[start : start + count])
            assert torch.equal(some[1], sums[start : start + count])
            assert some[2] == found[start : start + count]
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------ log-probabilities
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
