"""Attention within a window: right, exact, and blind to what lies outside."""

import pytest
import torch
from error_rule import allowed_error, error_of
from paged import all_kernels, few, goes_row_by_row, make_paged, native_kernels, once_for_all_kernels, plain_attention

from kernels import ops
from kernels.threads import num_threads, set_threads

WINDOWS = (1, 2, 5, 31, 32, 33, 100, 511, 512, 513)
OUT_OF_RANGE = (-1, 2**31 - 1)


@once_for_all_kernels
def plain_results(dtype, window, group, head_dim, block_size):
    """-> (sequences, the rows to compute, for each (fp32 result, allowed error))."""
    lengths = [1, 3, 33, 64, 97, 640]
    paged = make_paged(lengths, group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=group)
    parts = [(b, max(0, n - (1, 70, 5, 64)[b % 4]), n) for b, n in enumerate(lengths)]
    expected = []
    for b, first, _ in parts:
        qkv = paged.q[b][first:], paged.k[b], paged.v[b]
        exact = plain_attention(*(x.float() for x in qkv), paged.scale, window)
        expected.append((exact, allowed_error(plain_attention(*qkv, paged.scale, window), exact)))
    return paged, parts, expected


def hide_blocks(paged, b, first, window, fill=OUT_OF_RANGE[0]):
    """Block ids of sequence b that rows from `first` on do not see within the window become `fill`, their pages NaN."""
    unseen = max(0, first + 1 - window) // paged.spec.block_size
    known = [block for block in paged.tables[b, :unseen].tolist() if block not in OUT_OF_RANGE]
    paged.pool[known] = 0xFF
    paged.tables[b, :unseen] = fill


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(3, 64, 16), (1, 40, 6), (71, 32, 64)])
def test_error_is_that_of_plain_torch_at_most_twice(dtype, kernel, window, group, head_dim, block_size):
    paged, parts, expected = plain_results(dtype, window, group, head_dim, block_size)
    parts = few(kernel, parts, 20)
    outputs = paged.attend(kernel, parts, window=window)
    for part, out, (exact, allowed) in zip(parts, outputs, expected, strict=True):
        error = error_of(out, exact[-len(out) :])
        assert error <= allowed, (part, error, allowed)  # NaN fails too


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_a_window_as_long_as_the_context_changes_no_bit(dtype, kernel):
    paged = make_paged([700, 40], dtype=dtype)
    parts = [(0, 640, 700), (1, 0, 40)]
    none = paged.attend(kernel, parts)
    for window in (700, 701, 10**6, 2**31 - 1):
        for a, b in zip(none, paged.attend(kernel, parts, window=window), strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(none[0], paged.attend(kernel, parts, window=699)[0])


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("window", [1, 20, 32, 100, 512, 530])
@pytest.mark.parametrize(("group", "head_dim", "kv_heads"), [(3, 64, 3), (1, 80, 4), (71, 32, 1)])
def test_decode_and_chunks_equal_prefill(dtype, kernel, window, group, head_dim, kv_heads):
    paged = make_paged([1090], group=group, head_dim=head_dim, kv_heads=kv_heads, dtype=dtype)
    # where few tokens are seen; rows, and the starts of the longest windows, around the border of a split
    spans, chunks = (((0, 40), (490, 530), (1020, 1060)), (1, 37))
    if goes_row_by_row(kernel):
        spans, chunks = (((0, 18), (504, 522), (1022, 1040)), (1, 7))
    for first, end in spans:
        whole = paged.attend(kernel, [(0, first, end)], window=window)[0]
        for chunk in chunks:
            pieces = [
                paged.attend(kernel, [(0, i, min(i + chunk, end))], window=window)[0] for i in range(first, end, chunk)
            ]
            assert bits(torch.cat(pieces)).equal(bits(whole)), chunk


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("window", [7, 64, 513])
def test_company_and_number_of_threads(dtype, kernel, window):
    lengths = [700, 3, 32, 129, 513, 1040]
    paged = make_paged(lengths, dtype=dtype)
    parts = [(b, max(0, n - (1, 90, 17)[b % 3]), n) for b, n in enumerate(lengths)]
    alone = [paged.attend(kernel, [part], window=window)[0] for part in parts]
    before = num_threads()
    try:
        for threads in (1, 2, 5):
            set_threads(threads)
            for order in (parts, parts[::-1]):
                for part, out in zip(order, paged.attend(kernel, order, window=window), strict=True):
                    assert bits(out).equal(bits(alone[part[0]])), part
    finally:
        set_threads(before)


@pytest.mark.parametrize(("dtype", "kernel"), [p for p in native_kernels() if p.values[0] is torch.float32])
def test_not_even_the_sign_of_a_zero_depends_on_company(dtype, kernel):
    """Row 513 sees 512 and 513, which begin a split; in company the walk begins in the split before. Its value is a
    product too small for fp32: -0 by a fused multiply-add, and 0 once that of an empty split were added."""
    paged = make_paged([514], head_dim=16, dtype=dtype)
    paged.q[0][:], paged.k[0][:], paged.v[0][:] = 1.0, 0.0, 1.0
    paged.k[0][512], paged.v[0][512] = 1.0, 0.0
    paged.v[0][513] = -1.5e-45
    paged.store(0)
    alone, company = (paged.attend(kernel, [(0, first, 514)], window=2)[0][-1] for first in (513, 500))
    assert bits(company).equal(bits(alone))


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
@pytest.mark.parametrize("window", [5, 70])
def test_block_size(dtype, kernel, window):
    outputs = []
    for block_size in (16, 8, 32, 6, 48, 1024):
        paged, same = make_paged([550], block_size=block_size, dtype=dtype, seed=1), make_paged([550], dtype=dtype)
        paged.q[0], paged.k[0], paged.v[0] = same.q[0], same.k[0], same.v[0]
        paged.store(0)
        outputs.append(paged.attend(kernel, [(0, 470, 550)], window=window)[0])
    assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("block_size", [2, 6, 16, 64])
@pytest.mark.parametrize("window", [1, 33, 520])
@pytest.mark.parametrize("fill", OUT_OF_RANGE)
def test_blocks_that_no_row_sees_are_not_read(dtype, kernel, block_size, window, fill):
    """Out-of-range ids stand in the table in their place, and what they were is poisoned."""
    paged = make_paged([600, 600], block_size=block_size, dtype=dtype)
    for first in (550, 599):
        clean = paged.attend(kernel, [(0, first, 600)], window=window)[0]
        hide_blocks(paged, 0, first, window, fill)
        assert torch.equal(paged.attend(kernel, [(0, first, 600)], window=window)[0], clean)
        both = paged.attend(kernel, [(1, 560, 600), (0, first, 600)], window=window)
        assert torch.equal(both[1], clean) and both[0].isfinite().all()


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize(("window", "end"), [(5, 60), (33, 75), (64, 100)])
def test_what_has_left_the_window_adds_nothing(dtype, kernel, poison, window, end):
    """Also where earlier tokens of the same tile and token pair are not finite, and other rows of the call see them."""
    paged = make_paged([end], dtype=dtype)
    clean = paged.attend(kernel, [(0, 0, end)], window=window)[0]
    for cut in (3, 10, end - window - 1):  # tokens [cut - 2, cut) are poisoned
        k, v = paged.k[0].clone(), paged.v[0].clone()
        k[cut - 2 : cut], v[cut - 2 : cut] = poison, poison
        paged.store(0, k, v)
        free = cut - 1 + window  # the first row that sees none of them
        for first in (0, max(0, free - 3), free):
            out = paged.attend(kernel, [(0, first, end)], window=window)[0]
            assert torch.equal(out[free - first :], clean[free:]), (cut, first)
            assert torch.equal(out[: max(0, cut - 2 - first)], clean[first : max(first, cut - 2)]), (cut, first)
            assert first == free or out[: free - first].isnan().any()


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_walk_begins_at_absolute_tiles(dtype, kernel):
    """The check can fail: a walk from the window's own start would sum other tiles, and give other bits."""
    paged = make_paged([300, 284], dtype=dtype)
    paged.q[1][-1], paged.k[1], paged.v[1] = paged.q[0][-1], paged.k[0][16:], paged.v[0][16:]
    paged.store(1)
    here, shifted = (paged.attend(kernel, [(b, n - 1, n)], window=200)[0] for b, n in enumerate(paged.lengths))
    assert not torch.equal(here, shifted)
    assert (here.float() - shifted.float()).abs().max() < (0.05 if dtype is torch.bfloat16 else 1e-5)


def test_a_window_of_nothing_is_refused():
    paged = make_paged([8])
    ends = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(AssertionError):
        ops.paged_attention(paged.q[0], paged.pages(), paged.tables, ends, ends[1:], paged.scale, window=0)


def bits(x):
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)
