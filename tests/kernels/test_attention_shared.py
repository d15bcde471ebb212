"""Sequences that begin with the same pages walk them together, and each gets the bits that it gets alone."""

import pytest
import torch
from paged import kernels_for, make_paged, native_kernels

from configs.kv import KVFormat

LENGTHS = [1600, 1100, 1025, 1024, 1700, 513, 512, 40, 1300, 1290]


def share(paged, b, donor, tokens):
    """Sequence b begins with `tokens` tokens of another one, in that one's pages."""
    blocks = tokens // paged.spec.block_size
    paged.tables[b, :blocks] = paged.tables[donor, :blocks]


def beginnings_shared(**options):
    """All that is long enough begins with the first sequence's first 1,030 tokens; the last two with their own 600."""
    paged = make_paged(LENGTHS, **options)
    for b in range(1, 8):
        share(paged, b, 0, min(1030, LENGTHS[b] - 1))
    share(paged, 9, 8, 600)
    return paged


def check(paged, kernel, orders, **how):
    alone = [paged.attend(kernel, [(b, n - 1, n)], **how)[0] for b, n in enumerate(paged.lengths)]
    for order in orders:
        outs = paged.attend(kernel, [(b, paged.lengths[b] - 1, paged.lengths[b]) for b in order], **how)
        for b, out in zip(order, outs, strict=True):
            assert torch.equal(out, alone[b]), (b, order)


ORDERS = [range(10), range(9, -1, -1), (4, 9, 0, 8, 2, 1), (0, 4), (8, 9), (5, 0, 4, 1, 2)]


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_shared_beginnings(dtype, kernel, threads):
    paged = beginnings_shared(dtype=dtype)
    for count in (1, 2, 3):
        threads(count)
        check(paged, kernel, ORDERS)


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
@pytest.mark.parametrize(
    ("group", "head_dim", "kv_heads", "block_size"), [(1, 80, 4, 16), (8, 128, 1, 6), (71, 32, 1, 48)]
)
def test_shapes(dtype, kernel, group, head_dim, kv_heads, block_size):
    shape = {"group": group, "head_dim": head_dim, "kv_heads": kv_heads, "block_size": block_size}
    check(beginnings_shared(dtype=dtype, **shape), kernel, ORDERS[:3])


FORMATS = [(KVFormat.INT8, KVFormat.INT8), (KVFormat.INT4, KVFormat.FP8_E4M3), (KVFormat.FP8_E5M2, KVFormat.INT4)]


@pytest.mark.parametrize(
    ("formats", "dtype", "kernel"),
    [
        pytest.param(formats, *param.values, id=f"{formats[0].value}-{formats[1].value}-{param.id}")
        for formats in FORMATS
        for param in kernels_for(formats)
        if "reference" not in param.id
    ],
)
def test_formats(formats, dtype, kernel):
    check(beginnings_shared(dtype=dtype, formats=formats), kernel, ORDERS[:3])


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_windows_soft_caps_and_sinks(dtype, kernel):
    paged = beginnings_shared(dtype=dtype)
    for window in (300, 1300, 5000):
        check(paged, kernel, ORDERS[:3], window=window)
    sinks = torch.linspace(-2, 2, 6)
    check(paged, kernel, ORDERS[:3], softcap=20.0, sinks=sinks)


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_one_block_apart(dtype, kernel):
    """A single page that differs ends what is shared, wherever it lies."""
    paged = make_paged([1100] * 4, dtype=dtype)
    for b, other in ((1, 0), (2, 31), (3, 32)):
        own = paged.tables[b, other].clone()
        share(paged, b, 0, 1040)
        paged.tables[b, other] = own
    check(paged, kernel, [range(4), (0, 3), (0, 2), (1, 0), (3, 2, 1, 0)])


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_among_prompts(dtype, kernel):
    """Rows of a prompt that begins with the same pages stay by themselves."""
    paged = beginnings_shared(dtype=dtype)
    parts = [(0, 1599, 1600), (1, 1099, 1100), (4, 1650, 1700), (2, 1024, 1025), (8, 1299, 1300)]
    alone = [paged.attend(kernel, [part])[0] for part in parts]
    assert all(map(torch.equal, paged.attend(kernel, parts), alone))
