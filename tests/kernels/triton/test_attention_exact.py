"""Paged attention in Triton is exact: a row's bits depend on its own sequence, and not on what is computed with it, nor
on which kernel does it."""

import itertools

import pytest
import torch
from paged import Paged, make_paged

from configs.kv import KVFormat, KVOrder
from kernels.triton import attention
from kernels.triton.attention import paged_attention

F = KVFormat
BY_ROWS, BY_SPLITS = 0, 2**30
"""As `attention.PREFILL_HEADS`."""

exactly = pytest.mark.parametrize(
    ("dtype", "formats", "static"),
    [
        pytest.param(torch.bfloat16, None, False, id="bf16"),
        pytest.param(torch.float16, None, False, id="fp16"),
        pytest.param(torch.float32, None, False, id="fp32"),
        pytest.param(torch.bfloat16, (F.INT8, F.INT4), False, id="int8-int4"),
        pytest.param(torch.bfloat16, (F.INT4, F.FP8_E4M3), False, id="int4-e4m3"),
        pytest.param(torch.bfloat16, (F.FP8_E4M3, F.FP8_E5M2), True, id="static-e4m3-e5m2"),
    ],
)


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch):
    """(sequences, parts, way) -> their rows, one after the other"""

    def serve(paged: Paged, parts: list[tuple[int, int, int]], way: int = BY_ROWS, **asked: object) -> torch.Tensor:
        monkeypatch.setattr(attention, "PREFILL_HEADS", way)
        return torch.cat(paged.attend(paged_attention, parts, **asked))

    return serve


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits, none of them those of a number that nobody wrote."""
    return bits(one).equal(bits(other)) and bool(one.isfinite().all())


@exactly
def test_decode_and_chunks_equal_prefill(dtype, formats, static, attend):
    """Rows, and in half of the cases the starts of windows, around the border of a split."""
    paged = make_paged([1050], kv_heads=1, dtype=dtype, formats=formats, static=static, order=KVOrder.ROWS)
    asked = {"window": 530 if formats else None, "sinks": torch.linspace(-2, 2, 3)}
    for first, end in ((0, 5), (508, 516), (1026, 1050)):
        whole = attend(paged, [(0, first, end)], **asked)
        assert equal(attend(paged, [(0, first, end)], BY_SPLITS, **asked), whole)
        for chunk in (1, 7):
            pieces = [(i, min(i + chunk, end)) for i in range(first, end, chunk)][-2:]
            found = torch.cat([attend(paged, [(0, *piece)], **asked) for piece in pieces])
            assert equal(found, whole[pieces[0][0] - first :]), chunk


@exactly
def test_company(dtype, formats, static, attend):
    lengths = [530, 3, 32, 129]
    paged = make_paged(lengths, kv_heads=1, dtype=dtype, formats=formats, static=static, order=KVOrder.ROWS)
    parts = [(b, max(0, n - (1, 45, 17)[b % 3]), n) for b, n in enumerate(lengths)]
    alone = [attend(paged, [part]) for part in parts]
    for order, way in itertools.product((parts, parts[::-1]), (BY_ROWS, BY_SPLITS)):
        assert equal(attend(paged, order, way), torch.cat([alone[part[0]] for part in order]))
    ones = [(b, n - 1, n) for b, n in enumerate(lengths)]
    assert equal(attend(paged, ones), torch.cat([each[-1:] for each in alone]))


@pytest.mark.parametrize(
    ("group", "kv_heads", "formats"),
    [(71, 1, None), (7, 1, None), (8, 1, None), (8, 2, (F.INT8, F.INT8)), (3, 1, (F.INT8, F.INT8))],
)
def test_heads(group, kv_heads, formats, attend):
    """More than a tile has lines, as many as fill one, and as do not: alone, and in chunks."""
    paged = make_paged([530], group=group, kv_heads=kv_heads, head_dim=32, formats=formats, order=KVOrder.ROWS)
    whole = attend(paged, [(0, 525, 530)])
    assert equal(attend(paged, [(0, 525, 530)], BY_SPLITS), whole)
    assert equal(torch.cat([attend(paged, [(0, *chunk)]) for chunk in ((525, 527), (527, 529), (529, 530))]), whole)


@pytest.mark.parametrize("formats", [None, (F.INT8, F.INT4)])
def test_block_size(formats, attend):
    same = make_paged([300], kv_heads=1, formats=formats, order=KVOrder.ROWS)
    expected = attend(same, [(0, 295, 300)])
    for block_size in (4, 32, 6, 256):
        paged = make_paged([300], kv_heads=1, block_size=block_size, formats=formats, seed=1, order=KVOrder.ROWS)
        paged.q[0], paged.k[0], paged.v[0], paged.transforms = same.q[0], same.k[0], same.v[0], same.transforms
        paged.store(0)
        assert equal(attend(paged, [(0, 295, 300)]), expected)
        assert equal(attend(paged, [(0, 299, 300)]), expected[-1:])


def test_what_is_done_at_a_time(attend, monkeypatch):
    """Rows and sequences for which there is no room among partial results wait; splits and rows take turns."""
    paged = make_paged([600, 70, 30, 600], kv_heads=1, order=KVOrder.ROWS)
    parts = [(0, 599, 600), (1, 60, 70), (2, 29, 30), (3, 599, 600)]
    ones = [(b, n - 1, n) for b, n in enumerate(paged.lengths)]
    expected = [attend(paged, parts, way) for way in (BY_ROWS, BY_SPLITS)]
    assert equal(*expected)
    alone = attend(paged, ones)
    for states in (1, 3 * 3 * 2 * 66, 10 * 3 * 2 * 66):
        monkeypatch.setattr(attention, "STATES", states)
        for way in (BY_ROWS, BY_SPLITS):
            if way == BY_ROWS or states > 1:
                assert equal(attend(paged, parts, way), expected[0])
        assert equal(attend(paged, ones), alone)
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    assert equal(attend(paged, parts), expected[0])


def test_each_round_launches_its_own_sequences_only(attend, monkeypatch):
    """With a long window states of few sequences have room: programs of all others, round after round, would cost more
    than they compute."""
    paged = make_paged([70] * 7, kv_heads=1, order=KVOrder.ROWS)
    parts, grids = [(b, 69, 70) for b in range(7)], []
    expected = attend(paged, parts)
    kernel = attention.attend_splits

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(attention, "attend_splits", Noted())
    for places, counts in ((7, [7]), (3, [3, 3, 1]), (1, [1] * 7)):
        grids.clear()
        monkeypatch.setattr(attention, "STATES", places * 3 * 66 + 65)
        assert equal(attend(paged, parts), expected) and grids == counts


def test_as_many_rows_as_sequences_of_which_some_have_none(attend):
    """They look like a step that only decodes."""
    paged = make_paged([40, 50, 100], kv_heads=1, order=KVOrder.ROWS)
    expected = attend(paged, [(2, 70, 100)])
    parts = [*[(b % 2, 40 + 10 * (b % 2), 40 + 10 * (b % 2)) for b in range(29)], (2, 70, 100)]
    assert len(parts) == 30 and equal(attend(paged, parts), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_walk_begins_at_absolute_tiles(dtype, attend):
    """The check can fail: a walk from the window's own start would sum other tiles, and give other bits."""
    paged = make_paged([300, 284], kv_heads=1, dtype=dtype, order=KVOrder.ROWS)
    paged.q[1][-1], paged.k[1], paged.v[1] = paged.q[0][-1], paged.k[0][16:], paged.v[0][16:]
    paged.store(1)
    here, shifted = (attend(paged, [(b, n - 1, n)], window=200) for b, n in enumerate(paged.lengths))
    assert not torch.equal(here, shifted)
    assert (here.float() - shifted.float()).abs().max() < (0.05 if dtype is torch.bfloat16 else 1e-5)


def test_not_even_the_sign_of_a_zero_depends_on_company(attend):
    """Row 513 sees 512 and 513, which begin a split; in company the walk begins in the split before."""
    paged = make_paged([514], kv_heads=1, head_dim=16, dtype=torch.float32, order=KVOrder.ROWS)
    paged.q[0][:], paged.k[0][:], paged.v[0][:] = 1.0, 0.0, 1.0
    paged.k[0][512], paged.v[0][512] = 1.0, 0.0
    paged.v[0][513] = -1.5e-45
    paged.store(0)
    alone, company = (attend(paged, [(0, first, 514)], window=2)[-1] for first in (513, 500))
    assert equal(company, alone)
