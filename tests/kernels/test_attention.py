"""Paged attention is right: every kernel of this machine against fp32 torch, in a pool full of NaN."""

import math
import mmap

import pytest
import torch
from error_rule import allowed_error, assert_near, error_of
from paged import all_kernels, few, make_paged, native_kernels, once_for_all_kernels, plain_attention

from configs.kv import KVFormat, KVSpec, LayerKV
from kernels import ops, reference

SHAPES = [  # query heads a key/value head, head_dim, block size
    (3, 64, 16),
    (1, 64, 8),
    (4, 128, 32),
    (7, 80, 16),
    (8, 96, 8),
    (2, 32, 64),
    (5, 256, 16),
    (71, 64, 16),
    (3, 40, 6),
    (2, 6, 2),
]


@once_for_all_kernels
def plain_results(dtype, group, head_dim, block_size):
    """-> (sequences, the rows to compute, for each (fp32 result, allowed error))."""
    lengths = sorted({1, 2, block_size - 1, block_size, block_size + 1, 31, 32, 33, 65, 511, 512, 513, 600})
    paged = make_paged(
        lengths, group=group, kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=group
    )
    parts = [(b, max(0, n - (1, 2, 5, 40)[b % 4]), n) for b, n in enumerate(lengths)]
    expected = []
    for b, first, _ in parts:
        qkv = paged.q[b][first:], paged.k[b], paged.v[b]
        exact = plain_attention(*(x.float() for x in qkv), paged.scale)
        expected.append((exact, allowed_error(plain_attention(*qkv, paged.scale), exact)))
    return paged, parts, expected


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize(("group", "head_dim", "block_size"), SHAPES)
def test_error_is_that_of_plain_torch_at_most_twice(dtype, kernel, group, head_dim, block_size):
    paged, parts, expected = plain_results(dtype, group, head_dim, block_size)
    parts = few(kernel, parts, 5)
    for part, out, (exact, allowed) in zip(parts, paged.attend(kernel, parts), expected, strict=True):
        error = error_of(out, exact[-len(out) :])
        assert error <= allowed, (part, error, allowed)  # NaN fails too


@pytest.mark.parametrize(("dtype", "kernel"), [p for p in native_kernels() if p.values[0] is torch.float32])
def test_fp32_is_within_a_few_ulps_of_fp64(dtype, kernel):
    paged = make_paged([900], dtype=dtype)
    exact = plain_attention(*(x[0].double() for x in (paged.q, paged.k, paged.v)), paged.scale)
    assert (paged.whole(kernel, 0).double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_large_scores_neither_overflow_nor_vanish(dtype, kernel):
    paged = make_paged([100], dtype=dtype)
    paged.q[0] *= 200
    exact = plain_attention(*(x[0].double() for x in (paged.q, paged.k, paged.v)), paged.scale)
    assert_near(paged.whole(kernel, 0), plain_attention(paged.q[0], paged.k[0], paged.v[0], paged.scale), exact)


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("rise", [0.5, 4.0, 9.0, 40.0, -4.0, -40.0])
def test_scores_that_rise_or_fall_from_tile_to_tile(dtype, kernel, group, rise):
    """rise: of exponents of 2, every 32 tokens. What was summed so far is rescaled little, much or not at all."""
    length, rows = 640, 40
    paged = make_paged([length], group=group, dtype=dtype)
    paged.k[0][:, :, 0] = torch.arange(length)[:, None] / length
    paged.q[0][:, :, 0] = rise * length / 32 / (paged.scale * math.log2(math.e))
    paged.store(0)
    exact = plain_attention(*(x[0].double() for x in (paged.q, paged.k, paged.v)), paged.scale)[-rows:]
    out = paged.attend(kernel, [(0, length - rows, length)])[0]
    assert (out.double() - exact).abs().max() < (0.03 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [20, 75])
def test_what_a_row_does_not_see_adds_nothing(dtype, kernel, poison, length):
    """Also where later tokens of the same chunk, in the same tile and token pair, are not finite."""
    paged = make_paged([length], dtype=dtype)
    clean = paged.whole(kernel, 0)
    for cut in (1, length - 4):
        k, v = paged.k[0].clone(), paged.v[0].clone()
        k[cut:], v[cut:] = poison, poison
        paged.store(0, k, v)
        out = paged.whole(kernel, 0)
        assert torch.equal(out[:cut], clean[:cut]), cut
        assert out[cut:].isnan().any()


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_views_of_a_fused_buffer_serve_as_queries(dtype, kernel):
    paged = make_paged([50], dtype=dtype)
    expected = paged.whole(kernel, 0)
    fused = torch.full((50, 1000), float("nan"), dtype=dtype)
    view = fused[:, 7 : 7 + 6 * 64].view(50, 6, 64)
    view.copy_(paged.q[0])
    paged.q[0] = view
    ends = torch.tensor([0, 50], dtype=torch.int32)
    out = kernel(view, paged.pages(), paged.tables, ends, ends[1:], paged.scale)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_a_sequence_without_rows_is_passed_over(dtype, kernel):
    paged = make_paged([40, 50], dtype=dtype)
    out = paged.attend(kernel, [(0, 39, 40), (1, 50, 50), (1, 49, 50)])
    assert torch.equal(out[0], paged.attend(kernel, [(0, 39, 40)])[0])
    assert out[1].shape[0] == 0
    assert torch.equal(out[2], paged.attend(kernel, [(1, 49, 50)])[0])


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_no_rows_at_all(dtype, kernel):
    paged = make_paged([8], dtype=dtype)
    nothing, none = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    out = kernel(paged.q[0][:0], paged.pages(), paged.tables[:0], nothing, none, paged.scale)
    assert out.shape == (0, 6 * 64)


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_blocks_beyond_4_gib(dtype, kernel):
    form = KVFormat.BF16 if dtype is torch.bfloat16 else KVFormat.FP32
    spec = KVSpec((LayerKV(2, 64, form),) * 2, 16)
    blocks = (5 << 30) // spec.block_bytes
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # memory is committed as it is touched
    memory = mmap.mmap(-1, blocks * spec.block_bytes, flags=private)
    pool = torch.frombuffer(memory, dtype=torch.uint8)
    small = make_paged([40], dtype=dtype)
    far = make_paged([40], dtype=dtype)
    far.pool = pool.view(blocks, spec.block_bytes)
    far.tables[0, :3] = torch.tensor([blocks - 1, blocks // 2 + 7, blocks - 2])
    tokens = torch.arange(40)
    slots = far.tables[0].long()[tokens // 16] * 16 + tokens % 16
    ops.store_kv(far.k[0], far.v[0], far.pages(), slots)
    assert torch.equal(far.whole(kernel, 0), small.whole(kernel, 0))
    ops.copy_blocks(far.pool, [(blocks - 1, 1), (blocks - 2, blocks - 3)])
    assert torch.equal(far.pool[1], far.pool[blocks - 1])
    assert torch.equal(far.pool[blocks - 3], far.pool[blocks - 2])


def test_ops_serve_and_assert_their_contract():
    paged = make_paged([40])
    ends = torch.tensor([0, 40], dtype=torch.int32)
    arguments = (paged.q[0], paged.pages(), paged.tables, ends, ends[1:], paged.scale)
    assert (ops.paged_attention(*arguments).float() - reference.paged_attention(*arguments).float()).abs().max() < 0.05
    with pytest.raises(AssertionError):
        ops.paged_attention(paged.q[0].int(), *arguments[1:])
    with pytest.raises(AssertionError):
        ops.paged_attention(paged.q[0][:, :5], *arguments[1:])
    with pytest.raises(AssertionError):
        ops.paged_attention(*arguments[:2], paged.tables.long(), *arguments[3:])
    with pytest.raises(AssertionError):
        ops.LayerPages(paged.pool[:, :-1].contiguous(), paged.spec, 1)
    with pytest.raises(AssertionError):
        ops.LayerPages(paged.pool, paged.spec, 2)
