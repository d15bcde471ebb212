"""The pool's memory."""

import pytest
import torch

from configs.errors import StartupError
from engine.runner.kv_store.plain import HUGE_PAGE, allocate_pool

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


def test_elsewhere_torch_allocates_it_there():
    pool = allocate_pool(7, 4096, torch.device("meta"))
    assert pool.shape == (7, 4096) and pool.dtype == torch.uint8 and pool.is_meta and pool.is_contiguous()
