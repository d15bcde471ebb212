"""The pool's memory, and what is written into it."""

import ctypes
import mmap
import os

import pytest
import torch
from paged import plain_attention

from configs.errors import StartupError
from configs.kv import KVFormat, KVLayout, LayerKV
from engine.model.interface import AttentionLayer, ForwardBatch
from engine.runner.attention.paged import PagedAttention
from engine.runner.kv_store import HUGE_PAGE, UNTRANSFORMED, CommittedAhead, PagedStore, allocate_pool
from kernels.ops import KVTransform

CPU = torch.device("cpu")


def test_a_pool_is_zero_aligned_and_writable():
    pool = allocate_pool(7, 4096, CPU)
    assert pool.shape == (7, 4096) and pool.dtype == torch.uint8 and pool.is_contiguous()
    assert pool.data_ptr() % HUGE_PAGE == 0 and not pool.any()
    pool[6] = 255
    assert int(pool.sum()) == 255 * 4096


def test_memory_outlives_every_other_reference():
    view = allocate_pool(3, 8192, CPU)[2]
    others = [allocate_pool(3, 8192, CPU).fill_(9) for _ in range(4)]
    assert not view.any() and all(int(other[0, 0]) == 9 for other in others)


def test_a_pool_that_cannot_be_had_names_the_flags():
    with pytest.raises(StartupError, match=r"--kv-cache-memory-bytes.*--num-gpu-blocks-override"):
        allocate_pool(2**40, 2**20, CPU)


def resident(pool: torch.Tensor) -> int:
    """Bytes of the pool that have memory."""
    pages = (ctypes.c_ubyte * (pool.nbytes // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(pool.nbytes)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, size, pages) == 0, ctypes.get_errno()
    return sum(pages) * mmap.PAGESIZE


def populates() -> bool:
    """Whether this system provides memory when it is asked to, and tells what is resident."""
    system = ctypes.CDLL(None)
    if not (hasattr(system, "madvise") and hasattr(system, "mincore")):
        return False
    pool = allocate_pool(1, 1 << 20, CPU)
    address, size = ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(pool.nbytes)
    return system.madvise(address, size, CommittedAhead.MADV_POPULATE_WRITE) == 0


def refuse(*_: object) -> None:
    raise PermissionError("not in this container")


@pytest.mark.skipif(not populates(), reason="the system does not populate memory, or does not tell what is resident")
@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_committed_ahead_of_use(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommittedAhead, "AHEAD", 8 << 20)
    monkeypatch.setattr(CommittedAhead, "PIECE", 4 << 20)
    if fails:
        monkeypatch.setattr(os, "setpriority", refuse)
    pool = allocate_pool(65, 1 << 19, torch.device("cpu"))  # 32.5 MiB
    pool[0], pool[15] = 3, 7
    ahead = CommittedAhead(pool)

    def committed(block: int) -> int:
        ahead.reach(block)
        ahead._thread.join()
        return resident(pool) >> 20

    assert [committed(block) for block in (-1, 0, 8, 7, 15, 3)] == [8, 12, 16, 16, 16, 16]
    assert committed(64) == 32 and resident(pool) == pool.nbytes
    assert (pool[0] == 3).all() and (pool[15] == 7).all() and not pool[1:15].any() and not pool[16:].any()


def test_elsewhere_torch_allocates_it_there():
    pool = allocate_pool(7, 4096, torch.device("meta"))
    assert pool.shape == (7, 4096) and pool.dtype == torch.uint8 and pool.is_meta and pool.is_contiguous()


@pytest.mark.parametrize("window", [None, 4])
def test_a_store_writes_each_layer_in_its_formats(window: int | None):
    """Layers of two KV groups, one of them with scales that are given."""
    layers = (
        LayerKV(2, 32, KVFormat.INT8, value_format=KVFormat.INT4, window=window),
        LayerKV(2, 32, KVFormat.FP8_E4M3, static=True),
    )
    layout, channels = KVLayout.of(layers, 8), torch.rand(2, 2, 32) + 0.1
    pools = [allocate_pool(3, group.spec.block_bytes, CPU) for group in layout.groups]
    attention = PagedAttention(
        PagedStore(pools, layout, [UNTRANSFORMED, (KVTransform(channels[0]), KVTransform(channels[1]))]), layout
    )
    rows, groups = torch.arange(20), len(pools)
    ends, lengths = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots = tables[0].long()[rows // 8] * 8 + rows % 8
    batch = ForwardBatch(rows, rows, (slots,) * groups, ends, lengths, (tables,) * groups, rows)
    q, k, v = torch.randn(20, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    for layer, bound in ((0, 0.25), (1, 0.15)):
        out = attention.forward(AttentionLayer(layer, 0.2), q, k, v, batch)
        exact = plain_attention(q, k, v, 0.2, layers[layer].window)
        assert 1e-3 < (out - exact).norm() / exact.norm() < bound
    with pytest.raises(AssertionError):
        PagedStore(pools, layout)


def test_layers_without_scales_need_none():
    layout = KVLayout.of((LayerKV(2, 32, KVFormat.INT8),) * 3, 8)
    pools = [allocate_pool(3, group.spec.block_bytes, CPU) for group in layout.groups]
    assert [pages.transforms for pages in PagedStore(pools, layout).pages] == [UNTRANSFORMED] * 3
