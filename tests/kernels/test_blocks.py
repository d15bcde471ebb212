"""Whole blocks to and from a dense buffer."""

import pytest
import torch

from kernels import ops

PAGE = 4096


@pytest.mark.parametrize("ids", [[4, 0, 2], [5], []])
def test_blocks_leave_and_come_back(ids: list[int]) -> None:
    pool = torch.randint(0, 256, (6, 2 * PAGE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    chosen, before = torch.tensor(ids, dtype=torch.int64), pool.clone()
    out = torch.zeros(len(ids), 2 * PAGE, dtype=torch.uint8)
    ops.gather_blocks(pool, chosen, out)
    assert torch.equal(out, before[ids]) and torch.equal(pool, before)
    pool[ids] = 255
    ops.scatter_blocks(out, chosen, pool)
    assert torch.equal(pool, before)


def test_ops_assert_their_contracts() -> None:
    pool, dense = (torch.zeros(size, PAGE, dtype=torch.uint8) for size in (4, 2))
    ids = torch.tensor([3, 1])
    ops.gather_blocks(pool, ids, dense)
    for broken in (
        lambda: ops.gather_blocks(pool, ids.int(), dense),
        lambda: ops.gather_blocks(pool, ids[:1], dense),
        lambda: ops.gather_blocks(pool, ids, dense.view(torch.int8)),
        lambda: ops.gather_blocks(pool[:, : PAGE // 2].contiguous(), ids, dense[:, : PAGE // 2].contiguous()),
        lambda: ops.gather_blocks(pool, ids.to("meta"), dense),
        lambda: ops.scatter_blocks(dense[:, : PAGE // 2], ids, pool),
        lambda: ops.scatter_blocks(dense[:1], ids, pool),
        lambda: ops.copy_blocks(pool.view(8, -1), [(0, 1)]),
    ):
        with pytest.raises(AssertionError):
            broken()
