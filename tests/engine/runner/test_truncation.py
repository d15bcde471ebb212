"""Top-k, top-p and min-p against a plain per-row reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import INF, Row, random_logits, reference_distribution

from engine.runner.sampling.distribution import largest, padded
from engine.runner.sampling.truncation import truncate
from engine.sampling_params import SamplingParams


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
