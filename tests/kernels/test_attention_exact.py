"""A row's bits depend on its own sequence and on nothing else."""

import pytest
import torch
from paged import all_kernels, goes_row_by_row, make_paged, native_kernels

LENGTHS = [700, 3, 31, 32, 33, 64, 129, 511, 512, 513, 1040]


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_alone_and_in_company(dtype, kernel):
    paged = make_paged(LENGTHS, dtype=dtype)
    rows = (1, 1, 3, 5) if goes_row_by_row(kernel) else (1, 1, 17, 30)
    parts = [(b, max(0, n - rows[b % 4]), n) for b, n in enumerate(LENGTHS)]
    alone = [paged.attend(kernel, [part])[0] for part in parts]
    for order in (parts, parts[::-1], parts[3:] + parts[:3]):
        for part, out in zip(order, paged.attend(kernel, order), strict=True):
            assert torch.equal(out, alone[part[0]]), part


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
@pytest.mark.parametrize(("group", "head_dim", "kv_heads"), [(3, 64, 3), (1, 80, 4), (8, 128, 1), (71, 32, 1)])
def test_decode_and_chunks_equal_prefill(dtype, kernel, group, head_dim, kv_heads):
    paged = make_paged([560], group=group, head_dim=head_dim, kv_heads=kv_heads, dtype=dtype)
    # where few tokens are seen; around the border of a split
    spans, chunks = (((0, 70), (460, 560)), (1, 16, 37))
    if goes_row_by_row(kernel):
        spans, chunks = (((0, 18), (504, 522)), (1, 7))
    for first, end in spans:
        whole = paged.attend(kernel, [(0, first, end)])[0]
        for chunk in chunks:
            pieces = [paged.attend(kernel, [(0, i, min(i + chunk, end))])[0] for i in range(first, end, chunk)]
            assert torch.equal(torch.cat(pieces), whole), chunk


@pytest.mark.parametrize(("dtype", "kernel"), all_kernels())
def test_number_of_threads(dtype, kernel, threads):
    paged = make_paged(LENGTHS, dtype=dtype)
    batches = [
        [(b, n - 1, n) for b, n in enumerate(LENGTHS)],
        [(10, 1039, 1040)],
        [(10, 900, 1040), (0, 699, 700), (5, 0, 64)],
    ]
    for parts in batches:
        results = []
        for count in (1, 2, 3, 7):
            threads(count)
            results.append(torch.cat(paged.attend(kernel, parts)))
        assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_placement_and_block_size(dtype, kernel):
    """Tiles lie at absolute positions: how the tokens are cut into blocks does not matter either."""
    outputs = []
    for block_size, others in ((16, []), (16, [50, 90]), (8, []), (32, [7]), (6, []), (48, []), (1024, [])):
        paged = make_paged([550, *others], block_size=block_size, dtype=dtype, seed=1)
        reference = make_paged([550], dtype=dtype, seed=2)
        paged.q[0], paged.k[0], paged.v[0] = reference.q[0], reference.k[0], reference.v[0]
        paged.store(0)
        outputs.append(paged.whole(kernel, 0))
    assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_repeated_calls(dtype, kernel):
    paged = make_paged([1040, 40], dtype=dtype)
    parts = [(0, 800, 1040), (1, 39, 40)]
    first = torch.cat(paged.attend(kernel, parts))
    assert all(torch.equal(torch.cat(paged.attend(kernel, parts)), first) for _ in range(20))


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_another_order_is_not_equal(dtype, kernel):
    """The check can fail: the same tokens in another order of tiles are the same sum, and other bits."""
    paged = make_paged([513], dtype=dtype)
    out = paged.attend(kernel, [(0, 512, 513)])[0]
    order = torch.cat([torch.arange(32, 513), torch.arange(32)])
    paged.store(0, paged.k[0][order], paged.v[0][order])
    other = paged.attend(kernel, [(0, 512, 513)])[0]
    assert not torch.equal(out, other)
    assert (out.float() - other.float()).abs().max() < (0.02 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_other_tile_borders_are_not_equal(dtype, kernel):
    """Nor are the same tokens behind 16 others that weigh nothing: the tiles' borders fall elsewhere."""
    paged = make_paged([200, 216], dtype=dtype)
    k, v, last = paged.k[0], paged.v[0], paged.q[0][-1]
    last[:, 0], k[:, :, 0] = 100.0, 1.0
    weightless = k[:16].clone()
    weightless[:, :, 0] = -100.0
    paged.q[1][-1] = last
    paged.store(0)
    paged.store(1, torch.cat([weightless, k]), torch.cat([v[:16], v]))
    plain, shifted = (paged.attend(kernel, [(b, n - 1, n)])[0] for b, n in enumerate(paged.lengths))
    assert not torch.equal(plain, shifted)
    assert (plain.float() - shifted.float()).abs().max() < (0.05 if dtype is torch.bfloat16 else 1e-4)
