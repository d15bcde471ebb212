"""Paged attention in Triton is right: every format, shape and bend of the scores, in a pool full of NaN."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from error_rule import assert_near, times_plain
from paged import Paged, make_paged, plain_attention

from configs.kv import KVFormat, KVOrder, LayerKV
from kernels.triton import attention
from kernels.triton.attention import paged_attention

F = KVFormat
WAYS = {"by splits": 2**30, "by rows": 0}
"""With how many rows times heads `prefill` is what computes sequences with more than one row."""
Part = tuple[int, int, int]
"""(sequence, first row, row after the last)"""


@pytest.fixture(params=WAYS)
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[torch.Tensor]]:
    """`Paged.attend`, one way or the other."""
    monkeypatch.setattr(attention, "PREFILL_HEADS", WAYS[request.param])

    def serve(paged: Paged, parts: list[Part], **asked: Any) -> list[torch.Tensor]:
        return paged.attend(paged_attention, parts, **asked)

    return serve


def check(
    attend: Callable[..., list[torch.Tensor]],
    lengths: Sequence[int],
    rows: Sequence[int],
    asked: dict[str, Any] | None = None,
    **kind: Any,
) -> None:
    """By flash-attn's rule, all with K and V as pages hold them. The last `rows` of each sequence."""
    paged, as_bytes_mean = (make_paged(lengths, order=order, **kind) for order in (KVOrder.ROWS, KVOrder.PAIRED))
    parts = [(b, max(0, n - count), n) for b, (n, count) in enumerate(zip(lengths, rows, strict=True))]
    asked, times = asked or {}, times_plain(paged.pages().kind, paged.q[0].dtype)
    for (b, first, last), out in zip(parts, attend(paged, parts, **asked), strict=True):
        q, (k, v) = paged.q[b][first:last], as_bytes_mean.read(b)
        exact = plain_attention(q.double(), k, v, paged.scale, **asked)
        plain = plain_attention(q, k.to(q.dtype), v.to(q.dtype), paged.scale, **asked)
        assert_near(out, plain, exact, times)


SHAPES = [  # query heads a key/value head, key/value heads, head_dim, block size, dtype
    (3, 2, 64, 16, torch.bfloat16),
    (1, 1, 32, 256, torch.float16),
    (4, 1, 128, 32, torch.bfloat16),
    (7, 1, 80, 16, torch.bfloat16),
    (8, 1, 96, 32, torch.float32),
    (2, 1, 256, 16, torch.bfloat16),
    (71, 1, 40, 6, torch.bfloat16),
    (1, 3, 6, 2, torch.float32),
]


@pytest.mark.parametrize(("group", "kv_heads", "head_dim", "block_size", "dtype"), SHAPES, ids=str)
def test_error_is_that_of_plain_torch_at_most_twice(
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    attend: Callable[..., list[torch.Tensor]],
) -> None:
    lengths, rows = [1, block_size, block_size + 1, 64, 65, 513], [1, 2, 1, 20, 1, 3]
    kind = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    check(attend, lengths, rows, seed=group, **kind)


EACH = [(format, format) for format in F]
MIXED = [(F.INT8, F.INT4), (F.INT4, F.FP8_E4M3), (F.BF16, F.INT4), (F.FP8_E5M2, F.INT8), (F.FP32, F.INT8)]
STATIC = [(F.INT8, F.INT8), (F.FP8_E4M3, F.FP8_E4M3), (F.INT8, F.BF16), (F.INT4, F.FP8_E4M3)]
FORMATS = [
    pytest.param(both, static, id="-".join([*(each.value for each in both), *["static"] * static]))
    for both, static in [*((both, False) for both in EACH + MIXED), *((both, True) for both in STATIC)]
]
every_format = pytest.mark.parametrize(("formats", "static"), FORMATS)


@every_format
def test_formats(formats: tuple[F, F], static: bool, attend: Callable[..., list[torch.Tensor]]) -> None:
    shape = {"formats": formats, "static": static, "block_size": 16 if static else 32}
    check(attend, [70, 1, 33], [3, 1, 9], **shape)


@pytest.mark.parametrize(
    ("formats", "group", "head_dim", "dtype"),
    [
        ((F.INT4, F.INT4), 4, 128, torch.bfloat16),
        ((F.INT4, F.INT4), 1, 96, torch.float16),
        ((F.INT8, F.INT4), 7, 32, torch.float32),
        ((F.INT8, F.FP8_E4M3), 2, 80, torch.float16),
    ],
    ids=str,
)
def test_formats_in_other_shapes(
    formats: tuple[F, F], group: int, head_dim: int, dtype: torch.dtype, attend: Callable[..., list[torch.Tensor]]
) -> None:
    kind = {"formats": formats, "group": group, "head_dim": head_dim, "dtype": dtype, "kv_heads": 1}
    check(attend, [70, 5], [4, 1], **kind)


@pytest.mark.parametrize("formats", [None, (F.INT8, F.INT4)])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(1, None, False), (33, None, False), (513, None, True), (None, 1.5, False), (None, None, True), (70, 1.5, True)],
)
def test_windows_caps_and_sinks(
    window: int | None,
    softcap: float | None,
    sinks: bool,
    formats: tuple[F, F] | None,
    attend: Callable[..., list[torch.Tensor]],
) -> None:
    asked = {"window": window, "softcap": softcap, "sinks": torch.linspace(-2, 3, 3) if sinks else None}
    kind = {"formats": formats, "centred": False, "head_dim": 32, "kv_heads": 1}
    check(attend, [700, 97, 5], [1, 45, 5], asked, **kind)


def test_a_window_as_long_as_the_context_changes_no_bit(attend: Callable[..., list[torch.Tensor]]) -> None:
    paged = make_paged([600, 40], kv_heads=1, order=KVOrder.ROWS)
    parts = [(0, 597, 600), (1, 0, 40)]
    none = torch.cat(attend(paged, parts))
    for window in (600, 2**31 - 1):
        assert torch.equal(torch.cat(attend(paged, parts, window=window)), none)
    assert not torch.equal(torch.cat(attend(paged, parts, window=599)), none)


def test_a_sink_without_weight_changes_no_bit(attend: Callable[..., list[torch.Tensor]]) -> None:
    paged = make_paged([530], order=KVOrder.ROWS)
    part = [(0, 520, 530)]
    plain = attend(paged, part)[0]
    sinks = torch.full((6,), -torch.inf)
    assert torch.equal(attend(paged, part, sinks=sinks)[0], plain)
    sinks[4] = 0.0
    changed = (attend(paged, part, sinks=sinks)[0] != plain).view(10, 6, 64).flatten(2).any(2)
    assert changed.any(0).tolist() == [False, False, False, False, True, False]
    assert attend(paged, part, sinks=torch.full((6,), 1e4))[0].abs().max() == 0


def test_large_scores_neither_overflow_nor_vanish(attend: Callable[..., list[torch.Tensor]]) -> None:
    paged = make_paged([600], kv_heads=1, dtype=torch.float32, order=KVOrder.ROWS)
    paged.q[0] *= 200
    exact = plain_attention(*(x[0].double() for x in (paged.q, paged.k, paged.v)), paged.scale)
    assert (attend(paged, [(0, 590, 600)])[0] - exact[590:]).abs().max() < 1e-4
    capped = plain_attention(*(x[0].double() for x in (paged.q, paged.k, paged.v)), paged.scale, softcap=3.0)
    assert (attend(paged, [(0, 590, 600)], softcap=3.0)[0] - capped[590:]).abs().max() < 1e-4


# ------------------------------------------------------------------ what must not matter
@pytest.mark.parametrize(
    ("poison", "formats", "window"),
    [
        (torch.nan, None, None),
        (torch.inf, None, 9),
        (torch.inf, (F.INT8, F.INT8), None),
        (torch.nan, (F.INT4, F.INT4), 9),
        (torch.nan, (F.FP8_E5M2, F.FP8_E5M2), 9),
    ],
)
def test_what_a_row_does_not_see_adds_nothing(
    poison: float, formats: tuple[F, F] | None, window: int | None, attend: Callable[..., list[torch.Tensor]]
) -> None:
    """Tokens of the same chunk and tile, of one head, that are not finite: rows before them, rows whose window is past
    them, and the other head get what they would get."""
    clean, broken = (make_paged([75], formats=formats, order=KVOrder.ROWS) for _ in range(2))
    k, v = broken.k[0].clone(), broken.v[0].clone()
    k[40:43, 1], v[40:43, 1] = poison, poison
    broken.store(0, k, v)
    expected, found = (attend(each, [(0, 20, 75)], window=window)[0].view(55, 2, -1) for each in (clean, broken))
    assert torch.equal(found[:, 0], expected[:, 0])
    assert torch.equal(found[:20, 1], expected[:20, 1])
    if window:
        assert torch.equal(found[31:, 1], expected[31:, 1])
    if poison != poison or formats is None or formats[0] is not F.FP8_E5M2:  # which turns infinity into a number
        assert not found[20:31, 1].isfinite().all(1).any()


@pytest.mark.parametrize(
    ("byte", "formats"), [(0x7F, None), (0x7C, (F.FP8_E4M3, F.INT4)), (0x11, (F.INT4, F.FP8_E5M2))], ids=str
)
def test_whatever_is_in_slots_that_hold_nothing(
    byte: int, formats: tuple[F, F] | None, attend: Callable[..., list[torch.Tensor]]
) -> None:
    """As codes and as scales; it is NaN in other tests."""
    parts = [(0, 17, 20), (1, 1, 3), (2, 47, 50)]
    outputs = [
        torch.cat(attend(make_paged([20, 3, 50], formats=formats, poison=each, order=KVOrder.ROWS), parts))
        for each in (0xFF, byte)
    ]
    assert outputs[0].isfinite().all() and torch.equal(*outputs)


@pytest.mark.parametrize(
    ("block_size", "window", "fill"), [(2, 33, -1), (16, 1, 2**31 - 1), (16, 520, -1), (64, 33, 2**31 - 1)]
)
def test_blocks_that_no_row_sees_are_not_read(
    block_size: int, window: int, fill: int, attend: Callable[..., list[torch.Tensor]]
) -> None:
    """Nor what stands in the table in their place: it would lead out of the process's memory."""
    paged = make_paged([600], block_size=block_size, kv_heads=1, order=KVOrder.ROWS)
    for first in (585, 599):
        clean = attend(paged, [(0, first, 600)], window=window)[0]
        unseen = max(0, first + 1 - window) // block_size
        paged.pool[[block for block in paged.tables[0, :unseen].tolist() if block not in (-1, 2**31 - 1)]] = 0xFF
        paged.tables[0, :unseen] = fill
        assert torch.equal(attend(paged, [(0, first, 600)], window=window)[0], clean)


def test_views_of_a_fused_buffer_serve_as_queries(attend: Callable[..., list[torch.Tensor]]) -> None:
    for formats in (None, (F.INT8, F.INT8)):
        paged = make_paged([50], formats=formats, order=KVOrder.ROWS)
        expected = attend(paged, [(0, 0, 50)])[0]
        fused = torch.full((50, 1003), torch.nan, dtype=torch.bfloat16)
        view = fused[:, 7 : 7 + 6 * 64].view(50, 6, 64)
        view.copy_(paged.q[0])
        ends = torch.tensor([0, 50], dtype=torch.int32)
        tables = torch.full((2, 9), -1, dtype=torch.int32)[:1, :5]
        tables[0] = paged.tables[0]
        out = paged_attention(view, paged.pages(), tables, ends, ends[1:], paged.scale)
        assert torch.equal(out, expected)


def test_sequences_without_rows_or_without_tokens(attend: Callable[..., list[torch.Tensor]]) -> None:
    """The first are passed over; a row without tokens, which fills a batch up, gets zeros, and reads no table."""
    paged = make_paged([40, 50], order=KVOrder.ROWS)
    expected = attend(paged, [(0, 39, 40)])[0], attend(paged, [(1, 47, 50)])[0]
    q = torch.cat([paged.q[0][39:], paged.q[1][47:], paged.q[0][:2]])
    starts = torch.tensor([0, 0, 1, 1, 4, 5, 6], dtype=torch.int32)
    lengths = torch.tensor([40, 40, 7, 50, 0, 0], dtype=torch.int32)
    tables = torch.full((6, paged.tables.shape[1]), 2**31 - 1, dtype=torch.int32)
    tables[1], tables[3] = paged.tables
    for sinks in (None, torch.zeros(6)):
        out = paged_attention(q, paged.pages(), tables, starts, lengths, paged.scale, sinks=sinks)
        assert out[4:].abs().max() == 0
        if sinks is None:
            assert torch.equal(out[:1], expected[0]) and torch.equal(out[1:4], expected[1])


@pytest.mark.parametrize("formats", [None, (F.INT8, F.INT8)])
def test_no_rows_at_all(formats: tuple[F, F] | None) -> None:
    paged = make_paged([8], formats=formats, order=KVOrder.ROWS)
    nothing, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    out = paged_attention(paged.q[0][:0], paged.pages(), paged.tables[:0], nothing, none, paged.scale)
    assert out.shape == (0, 6 * 64) and out.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        (torch.bfloat16, None),
        (torch.float32, None),
        (torch.bfloat16, (F.INT8, F.INT4)),
        (torch.bfloat16, (F.INT4, F.FP8_E4M3)),
    ],
    ids=str,
)
def test_blocks_beyond_2_to_the_31_numbers(
    dtype: torch.dtype,
    formats: tuple[F, F] | None,
    far_memory: Callable[[int], torch.Tensor],
    attend: Callable[..., list[torch.Tensor]],
) -> None:
    """Of the widest format. Codes and scales are counted apart."""
    small, far = (make_paged([40], dtype=dtype, formats=formats, kv_heads=1, order=KVOrder.ROWS) for _ in range(2))
    size = far.spec.block_bytes
    blocks = (9 << 30) // size
    far.pool = far_memory(blocks * size).view(blocks, size)
    far.tables[0, :3] = torch.tensor([blocks - 1, blocks // 2 + 7, blocks - 2])
    far.store(0)
    parts = [(0, 38, 40)]
    assert torch.equal(attend(far, parts)[0], attend(small, parts)[0])


@pytest.mark.parametrize("formats", [None, (F.INT8, F.INT8)])
def test_rows_and_tables_that_are_far_apart(
    formats: tuple[F, F] | None,
    far_memory: Callable[[int], torch.Tensor],
    attend: Callable[..., list[torch.Tensor]],
) -> None:
    """The last begin behind 2**31 numbers. With int8 the queries are read by `rotation`."""
    paged = make_paged([20, 17, 40], formats=formats, kv_heads=1, order=KVOrder.ROWS)
    parts = [(0, 19, 20), (1, 16, 17), (2, 38, 40)]
    expected = torch.cat(attend(paged, parts))
    rows, apart = torch.cat([paged.q[b][first:last] for b, first, last in parts]), 2**30 + 8
    q = far_memory(2 * (3 * apart + 3 * 64)).view(torch.bfloat16).as_strided((4, 3, 64), (apart, 64, 1))
    tables = far_memory(4 * (2 * apart + 4)).view(torch.int32).as_strided((3, 4), (apart, 1))
    q.copy_(rows), tables.copy_(paged.tables)
    starts, lengths = torch.tensor([0, 1, 2, 4], dtype=torch.int32), torch.tensor([20, 17, 40], dtype=torch.int32)
    assert torch.equal(paged_attention(q, paged.pages(), tables, starts, lengths, paged.scale), expected)


def test_pages_as_a_cpu_reads_them_are_refused() -> None:
    paged = make_paged([8])
    with pytest.raises(AssertionError):
        paged.whole(paged_attention, 0)


def test_a_gpu_with_less_memory_gets_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of H100, A100 and L4, for 128 numbers of bf16 a head."""
    shape = attention.shape_of(LayerKV(8, 128, F.BF16), 16, 2**16, 32, torch.bfloat16, False, False)
    chosen = []
    for index, room in enumerate((232448, 166912, 101376)):
        monkeypatch.setattr(attention, "shared_bytes_of", lambda device, room=room: room)
        device = torch.device("cuda", index)
        chosen.append([attention.launch_of(shape, among, device) for among in (attention.DECODE, attention.PREFILL)])
    decode, prefill = attention.DECODE, attention.PREFILL
    assert chosen == [[decode[0], prefill[0]], [decode[0], prefill[0]], [decode[1], prefill[1]]]
