"""Writing pages and copying blocks."""

import pytest
import torch
from paged import FORMATS

from configs.kv import KVFormat, KVSpec, LayerKV
from kernels import ops, reference
from kernels.cpu import attention as native
from kernels.cpu import library

STORES = [pytest.param(reference.store_kv, id="reference")]
COPIES = [pytest.param(reference.copy_blocks, id="reference")]
if found := library.load():
    STORES.append(pytest.param(native.native_store(found), id="native"))
    COPIES.append(pytest.param(native.native_copy(found), id="native"))

DTYPES = pytest.mark.parametrize("dtype", FORMATS, ids=str)


def number_at(pool, spec, layer, part, block, index, dtype):
    """One number of a block by the layout's arithmetic alone: part 0 is K, 1 is V; index as in `configs.kv`."""
    shape = spec.halves[layer][part].codes.shape
    flat = 0
    for size, i in zip(shape, index, strict=True):
        flat = flat * size + i
    offset = spec.halves[layer][part].codes.offset + flat * dtype.itemsize
    return pool[block, offset : offset + dtype.itemsize].clone().view(dtype).item()


@DTYPES
@pytest.mark.parametrize("store", STORES)
def test_every_number_lands_where_the_layout_says(store, dtype):
    spec = KVSpec((LayerKV(2, 6, FORMATS[dtype]), LayerKV(3, 4, FORMATS[dtype])), 4)
    pool = torch.zeros(3, spec.block_bytes, dtype=torch.uint8)
    k, v = (torch.arange(24.0).view(2, 3, 4).add(start).to(dtype) for start in (1, 101))
    store(k, v, ops.LayerPages(pool, spec, 1), torch.tensor([2 * 4 + 3, 0 * 4 + 2]))
    pair = FORMATS[dtype].pair
    for token, (block, offset) in enumerate([(2, 3), (0, 2)]):
        for head in range(3):
            for d in range(4):
                at_k, at_v = (head, d // pair, offset, d % pair), (head, offset // pair, d, offset % pair)
                assert number_at(pool, spec, 1, 0, block, at_k, dtype) == k[token, head, d]
                assert number_at(pool, spec, 1, 1, block, at_v, dtype) == v[token, head, d]
    assert pool.count_nonzero() == sum((x.view(torch.uint8) != 0).sum() for x in (k, v))  # and nothing else changed


@DTYPES
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "head_dim", "block_size"), [(1, 3, 64, 16), (300, 3, 64, 16), (70, 2, 40, 6)]
)
def test_views_of_a_fused_buffer_and_skipped_slots(store, dtype, tokens, kv_heads, head_dim, block_size):
    spec = KVSpec((LayerKV(kv_heads, head_dim, FORMATS[dtype]),) * 2, block_size)
    size = kv_heads * head_dim
    fused = torch.randn(tokens, 3 * size + 5).to(dtype)
    k, v = (fused[:, start : start + size].view(tokens, kv_heads, head_dim) for start in (5, 5 + 2 * size))
    slots = torch.randperm(tokens + 40)[:tokens]
    slots[::7] = -1
    pool = torch.full((-(-(tokens + 40) // block_size), spec.block_bytes), 0xFF, dtype=torch.uint8)
    expected = pool.clone()
    store(k, v, ops.LayerPages(pool, spec, 1), slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            one = slice(token, token + 1)
            reference.store_kv(k[one], v[one], ops.LayerPages(expected, spec, 1), slots[one])
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_applied_in_order(copy):
    pool = torch.randint(0, 256, (6, 4096), dtype=torch.uint8)
    before = pool.clone()
    copy(pool, [(0, 1), (1, 2), (4, 4), (5, 0)])
    assert torch.equal(pool, before[[5, 0, 0, 3, 4, 5]])
    copy(pool, [])
    assert torch.equal(pool, before[[5, 0, 0, 3, 4, 5]])


def test_ops_assert_their_contract():
    spec = KVSpec((LayerKV(2, 8, KVFormat.BF16),), 4)
    pool = torch.zeros(2, spec.block_bytes, dtype=torch.uint8)
    k, slots = torch.ones(3, 2, 8, dtype=torch.bfloat16), torch.tensor([0, 1, -1])
    pages = ops.LayerPages(pool, spec, 0)
    ops.store_kv(k, k, pages, slots)
    for broken in (
        lambda: ops.store_kv(k.float(), k.float(), pages, slots),
        lambda: ops.store_kv(k, k[:2], pages, slots),
        lambda: ops.store_kv(k, k, pages, slots.int()),
        lambda: ops.store_kv(k.transpose(1, 2).contiguous().transpose(1, 2), k, pages, slots),
        lambda: ops.LayerPages(pool.view(4, -1), spec, 0),
        lambda: ops.copy_blocks(pool.float(), [(0, 1)]),
    ):
        with pytest.raises(AssertionError):
            broken()
