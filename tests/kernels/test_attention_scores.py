"""Soft-capped scores and sinks: right, exact, and without a trace where nobody asks for them."""

import functools
import math

import pytest
import torch
from error_rule import allowed_error, error_of
from paged import all_kernels, few, goes_row_by_row, make_paged, native_kernels, once_for_all_kernels, plain_attention

from kernels import ops
from kernels.threads import num_threads, set_threads

ASKED = {"softcap": (3.0, False), "sinks": (None, True), "both": (3.0, True)}
"""By name: the cap, and whether there are sinks. Scores are drawn several times as large as the cap."""


def random_sinks(heads):
    """Some weigh more than all tokens together, some nothing."""
    return torch.randn(heads, generator=torch.Generator().manual_seed(heads)) * 4


def steep(lengths, **shape):
    paged = make_paged(lengths, **shape)
    paged.q = [q * 4 for q in paged.q]
    return paged


def asked_of(paged, name):
    softcap, sinks = ASKED[name]
    return {"softcap": softcap, "sinks": random_sinks(paged.q[0].shape[1]) if sinks else None}


@once_for_all_kernels
def plain_results(dtype, name, window, group, head_dim, block_size):
    """-> (sequences, the rows to compute, for each (fp64 result, allowed error))."""
    lengths = [1, 3, 33, 64, 97, 640]
    paged = steep(lengths, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=group)
    parts = [(b, max(0, n - (1, 70, 5, 64)[b % 4]), n) for b, n in enumerate(lengths)]
    expected = []
    for b, first, _ in parts:
        qkv, asked = (paged.q[b][first:], paged.k[b], paged.v[b]), asked_of(paged, name)
        exact = plain_attention(*(x.double() for x in qkv), paged.scale, window, **asked)
        expected.append((exact, allowed_error(plain_attention(*qkv, paged.scale, window, **asked), exact)))
    return paged, parts, expected


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(3, 64, 16), (8, 128, 32), (1, 40, 6), (71, 32, 64)])
def test_error_is_that_of_plain_torch_at_most_twice(dtype, kernel, name, window, group, head_dim, block_size):
    paged, parts, expected = plain_results(dtype, name, window, group, head_dim, block_size)
    parts = few(kernel, parts, 20)
    outputs = paged.attend(kernel, parts, window=window, **asked_of(paged, name))
    for part, out, (exact, allowed) in zip(parts, outputs, expected, strict=True):
        error = error_of(out, exact[-len(out) :])
        assert error <= allowed, (part, error, allowed)  # NaN fails too


@once_for_all_kernels
def exact_results(name, steepness):
    """-> (a sequence in fp32, what fp64 says, what is asked)"""
    paged = make_paged([900], dtype=torch.float32)
    paged.q[0] *= steepness
    asked = asked_of(paged, name)
    return paged, plain_attention(*(x[0].double() for x in (paged.q, paged.k, paged.v)), paged.scale, **asked), asked


@pytest.mark.parametrize(("dtype", "kernel"), [p for p in native_kernels() if p.values[0] is torch.float32])
@pytest.mark.parametrize(
    ("name", "steepness"), [("sinks", 1.0), *((name, x) for name in ("softcap", "both") for x in (0.1, 1.0, 10.0))]
)
def test_fp32_is_within_a_few_ulps_of_fp64(dtype, kernel, name, steepness):
    """From scores that the cap hardly touches to those of which it leaves the sign."""
    paged, exact, asked = exact_results(name, steepness)
    out = paged.attend(kernel, [(0, 0, 900)], **asked)[0]
    assert (out.double() - exact).abs().max() < (2e-6 if steepness > 1 else 1e-6)


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("window", [None, 40])
def test_a_sink_without_weight_changes_no_bit(dtype, kernel, window):
    paged = make_paged([600], dtype=dtype)
    part = [(0, 590, 600)]
    plain = paged.attend(kernel, part, window=window)[0]
    assert torch.equal(paged.attend(kernel, part, window=window, sinks=torch.full((6,), -math.inf))[0], plain)
    sinks = torch.full((6,), -math.inf)
    sinks[4] = 0.0
    changed = (paged.attend(kernel, part, window=window, sinks=sinks)[0] != plain).view(10, 6, 64).flatten(2).any(2)
    assert changed.any(0).tolist() == [False, False, False, False, True, False]


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_extreme_sinks_and_scores(dtype, kernel):
    """Nothing overflows: what is capped stays below the cap, and a huge sink leaves no weight to tokens."""
    paged = make_paged([100], dtype=dtype)
    assert paged.attend(kernel, [(0, 0, 100)], sinks=torch.full((6,), 1e4))[0].abs().max() == 0
    paged.q[0] *= 1e4
    qkv, tolerance = (paged.q[0], paged.k[0], paged.v[0]), 0.02 if dtype is torch.bfloat16 else 1e-4
    for sinks in (-1e4, 1.0):
        asked = {"softcap": 2.0, "sinks": torch.full((6,), sinks)}
        exact = plain_attention(*(x.double() for x in qkv), paged.scale, **asked)
        assert (paged.attend(kernel, [(0, 0, 100)], **asked)[0] - exact).abs().max() < tolerance


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_row_does_not_see_adds_nothing(dtype, kernel, poison):
    """A score is capped before it is hidden."""
    paged = make_paged([75], dtype=dtype)
    asked = asked_of(paged, "both")
    clean = paged.attend(kernel, [(0, 0, 75)], window=30, **asked)[0]
    k, v = paged.k[0].clone(), paged.v[0].clone()
    k[40:43], v[40:43] = poison, poison
    paged.store(0, k, v)
    out = paged.attend(kernel, [(0, 0, 75)], window=30, **asked)[0]
    assert torch.equal(out[:40], clean[:40]) and torch.equal(out[72:], clean[72:]) and out[40:72].isnan().any()


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("group", "head_dim", "kv_heads"), [(3, 64, 3), (71, 32, 1)])
def test_decode_and_chunks_equal_prefill(dtype, kernel, name, window, group, head_dim, kv_heads):
    paged = steep([560], group=group, head_dim=head_dim, kv_heads=kv_heads, dtype=dtype)
    spans, chunks = (((0, 70), (490, 560)), (1, 37))
    if goes_row_by_row(kernel):
        spans, chunks = (((0, 18), (504, 522)), (1, 7))
    attend = functools.partial(paged.attend, kernel, window=window, **asked_of(paged, name))
    for first, end in spans:
        whole = attend([(0, first, end)])[0]
        for chunk in chunks:
            pieces = [attend([(0, i, min(i + chunk, end))])[0] for i in range(first, end, chunk)]
            assert torch.equal(torch.cat(pieces), whole), chunk


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("window", [None, 64])
def test_company_and_number_of_threads(dtype, kernel, name, window):
    lengths = [700, 3, 32, 129, 513, 1040]
    paged = steep(lengths, dtype=dtype)
    parts = [(b, max(0, n - (1, 90, 17)[b % 3]), n) for b, n in enumerate(lengths)]
    parts = few(kernel, parts)
    attend = functools.partial(paged.attend, kernel, window=window, **asked_of(paged, name))
    alone = [attend([part])[0] for part in parts]
    before = num_threads()
    try:
        for threads in (1, 2, 5):
            set_threads(threads)
            for order in (parts, parts[::-1]):
                for part, out in zip(order, attend(order), strict=True):
                    assert torch.equal(out, alone[part[0]]), part
    finally:
        set_threads(before)


def test_ops_serve_and_assert_their_contract():
    paged = make_paged([40])
    ends = torch.tensor([0, 40], dtype=torch.int32)
    serve = functools.partial(
        ops.paged_attention, paged.q[0], paged.pages(), paged.tables, ends, ends[1:], paged.scale, None
    )
    sinks = random_sinks(6)
    expected = plain_attention(paged.q[0], paged.k[0], paged.v[0], paged.scale, None, 2.0, sinks)
    assert (serve(2.0, sinks).float() - expected.float()).abs().max() < 0.05
    broken = [sinks[:5], sinks[None], sinks.double(), sinks.bfloat16(), torch.zeros(12)[::2], sinks.to("meta")]
    for softcap, each in [(0.0, None), (-1.0, None), *((None, each) for each in broken)]:
        with pytest.raises(AssertionError):
            serve(softcap, each)
