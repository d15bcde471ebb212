"""Attention over pages of every format: right about what the pages hold, and exact."""

import itertools
import random

import pytest
import torch
from error_rule import allowed_error, error_of, times_plain
from paged import few, goes_row_by_row, kernels_for, make_paged, native_kernels, once_for_all_kernels, plain_attention

from configs.kv import KVFormat
from kernels import ops, reference
from kernels.cpu import library
from kernels.ops import KVTransform
from kernels.registry import choose
from kernels.threads import num_threads, set_threads

F = KVFormat
SAME = [(format, format) for format in KVFormat]
MIXED = [
    (F.INT8, F.INT4), (F.INT4, F.FP8_E4M3), (F.BF16, F.INT4), (F.FP8_E5M2, F.INT8), (F.FP32, F.INT8), (F.INT4, F.BF16),
    (F.FP8_E4M3, F.FP16), (F.FP8_E5M2, F.FP8_E4M3),
]  # fmt: skip
STATIC = [(F.INT8, F.INT8), (F.FP8_E4M3, F.FP8_E4M3), (F.INT8, F.BF16), (F.INT4, F.FP8_E4M3), (F.FP8_E4M3, F.INT4)]
QUANTISED = [both for both in SAME if both[0].is_quantised]


def cases(formats, static=()):
    """pytest parameters (dtype, kernel, formats of K and V, whether scales are static)."""
    return [
        pytest.param(
            *param.values, both, fixed, id="-".join([param.id or "", *(f.value for f in both), "static" * fixed])
        )
        for both, fixed in [*((each, False) for each in formats), *((each, True) for each in static)]
        for param in kernels_for(both)
    ]


every_format = pytest.mark.parametrize(("dtype", "kernel", "formats", "static"), cases(SAME + MIXED, STATIC))
exactly = pytest.mark.parametrize(
    ("dtype", "kernel", "formats", "static"),
    cases([*SAME, (F.INT8, F.INT4), (F.INT4, F.FP8_E4M3), (F.BF16, F.INT8), (F.FP32, F.FP16)], [(F.INT8, F.FP8_E4M3)]),
)
quantised = pytest.mark.parametrize(
    ("dtype", "kernel", "formats", "static"),
    cases([*QUANTISED, (F.INT8, F.INT4), (F.INT4, F.FP8_E4M3)], [(F.INT8, F.FP8_E4M3)]),
)


@once_for_all_kernels
def plain_results(dtype, formats, static, window=None, softcap=None, sinks=False, shape=(3, 64, 16)):
    """-> (sequences, the rows to compute, for each (fp64 result, allowed error)) of what the pages hold."""
    group, head_dim, block_size = shape
    lengths = [1, 2, block_size - 1, block_size + 1, 33, 600]
    paged = make_paged(
        lengths,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=1,
        formats=formats,
        static=static,
        centred=softcap is None and not sinks,
    )
    parts = [(b, max(0, n - (1, 2, 5, 40)[b % 4]), n) for b, n in enumerate(lengths)]
    asked = {"window": window, "softcap": softcap, "sinks": torch.linspace(-2, 3, 2 * group) if sinks else None}
    times, expected = times_plain(paged.pages().kind, dtype), []
    for b, first, _ in parts:
        q, (k, v) = paged.q[b][first:], paged.read(b)
        exact = plain_attention(q.double(), k, v, paged.scale, **asked)
        plain = plain_attention(q, k.to(dtype), v.to(dtype), paged.scale, **asked)
        expected.append((exact, allowed_error(plain, exact, times)))
    return paged, parts, expected, asked


def check(kernel, results):
    paged, parts, expected, asked = results
    parts = few(kernel, parts, 2)
    for part, out, (exact, allowed) in zip(parts, paged.attend(kernel, parts, **asked), expected, strict=True):
        error = error_of(out, exact[-len(out) :])
        assert error <= allowed, (part, error, allowed)  # NaN fails too


@every_format
def test_error_is_that_of_plain_torch_at_most_a_few_times(dtype, kernel, formats, static):
    """With what the pages hold as K and V."""
    check(kernel, plain_results(dtype, formats, static))


@quantised
@pytest.mark.parametrize(
    "shape", [(1, 64, 8), (4, 128, 32), (8, 96, 16), (2, 32, 64), (5, 256, 16), (71, 64, 16), (3, 160, 4), (9, 64, 6)]
)
def test_shapes(dtype, kernel, formats, static, shape):
    """Query heads a key/value head, head_dim, block size."""
    check(kernel, plain_results(dtype, formats, static, shape=shape))


@pytest.mark.parametrize(("dtype", "kernel", "formats", "static"), cases([(F.INT8,) * 2, (F.FP8_E4M3, F.FP8_E5M2)]))
@pytest.mark.parametrize("shape", [(3, 80, 16), (2, 40, 6), (2, 6, 2)])
def test_head_dims_that_vectors_do_not_divide(dtype, kernel, formats, static, shape):
    check(kernel, plain_results(dtype, formats, static, shape=shape))


@quantised
@pytest.mark.parametrize("asked", [(33, None, False), (None, 1.5, False), (None, None, True), (70, 1.5, True)])
def test_windows_caps_and_sinks(dtype, kernel, formats, static, asked):
    check(kernel, plain_results(dtype, formats, static, *asked))


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
@pytest.mark.parametrize("format", [F.FP8_E4M3, F.FP8_E5M2, F.INT8], ids=lambda format: format.value)
def test_codes_are_read_exactly(dtype, kernel, format):
    """All that there are, as K and as V: the bits are those of attention over the same numbers in the plain format."""
    codes = torch.arange(256).to(torch.uint8).view(getattr(torch, format.dtype)).float()
    codes = codes[codes.isfinite() & (codes != -128)]
    generator = torch.Generator().manual_seed(0)
    numbers = codes[torch.randint(len(codes), (75, 2, 64), generator=generator)].to(dtype)
    assert len(numbers.unique()) == len(codes.unique())
    outputs = []
    for paged in (
        make_paged([75], dtype=dtype, formats=(format, format), static=format.may_be_static),
        make_paged([75], dtype=dtype),
    ):
        paged.q[0] /= numbers.abs().max()
        paged.transforms = tuple(
            KVTransform(None if each.channels is None else torch.ones_like(each.channels)) for each in paged.transforms
        )
        paged.store(0, numbers, numbers)
        outputs.append(paged.whole(kernel, 0))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("dtype", "kernel"), native_kernels())
def test_any_combination_agrees_with_the_reference(dtype, kernel):
    choose_from = random.Random(0)
    pairs = [both for both in itertools.product(F, repeat=2) if ops.compute_dtype(dtype, both) in kernel.entries]
    for seed in range(60):
        formats = choose_from.choice(pairs)
        group, static = choose_from.choice((1, 2, 3, 7)), choose_from.random() < 0.3
        paged = make_paged(
            [choose_from.randint(1, 300)],
            group=group,
            head_dim=choose_from.choice((32, 64, 96, 128, 256) if F.INT4 in formats else (6, 32, 40, 64, 80, 96, 256)),
            block_size=choose_from.choice((4, 8, 16, 32, 48)),
            dtype=dtype,
            seed=seed,
            formats=formats,
            static=static and any(format.may_be_static for format in formats),
        )
        parts = [(0, max(0, paged.lengths[0] - choose_from.choice((1, 2, 5))), paged.lengths[0])]
        asked = {
            "window": choose_from.choice((None, 5, 100)),
            "softcap": choose_from.choice((None, 2.0)),
            "sinks": choose_from.choice((None, torch.linspace(-1, 1, 2 * group))),
        }
        out, expected = (paged.attend(each, parts, **asked)[0] for each in (kernel, reference.paged_attention))
        allowed = expected.abs().max() * (0.02 if dtype is torch.bfloat16 else 1e-5)
        assert (out - expected).abs().max() <= allowed, (seed, formats, paged.spec, asked)  # NaN fails too


@exactly
def test_decode_and_chunks_equal_prefill(dtype, kernel, formats, static):
    paged = make_paged([600], dtype=dtype, formats=formats, static=static)
    spans, chunks = (((0, 50), (490, 560)), (1, 37))
    if goes_row_by_row(kernel):
        spans, chunks = (((0, 10), (504, 522)), (1, 7))
    for first, end in spans:
        whole = paged.attend(kernel, [(0, first, end)])[0]
        for chunk in chunks:
            pieces = [paged.attend(kernel, [(0, i, min(i + chunk, end))])[0] for i in range(first, end, chunk)]
            assert torch.equal(torch.cat(pieces), whole), chunk


@exactly
@pytest.mark.parametrize("window", [None, 64])
def test_company_and_number_of_threads(dtype, kernel, formats, static, window):
    lengths = [700, 3, 32, 129, 513]
    paged = make_paged(lengths, dtype=dtype, formats=formats, static=static)
    parts = few(kernel, [(b, max(0, n - (1, 90, 17)[b % 3]), n) for b, n in enumerate(lengths)])
    alone = [paged.attend(kernel, [part], window=window)[0] for part in parts]
    before = num_threads()
    try:
        for threads, order in itertools.product((1, 2, 5), (parts, parts[::-1])):
            set_threads(threads)
            for part, out in zip(order, paged.attend(kernel, order, window=window), strict=True):
                assert torch.equal(out, alone[part[0]]), part
    finally:
        set_threads(before)


@once_for_all_kernels
def in_blocks_of_many_sizes(dtype, formats, static):
    """The same sequence."""
    same = make_paged([300], dtype=dtype, formats=formats, static=static)
    found = [same]
    for block_size in (4, 32, 6, 48, 1024):
        paged = make_paged([300], block_size=block_size, dtype=dtype, formats=formats, static=static, seed=1)
        paged.q[0], paged.k[0], paged.v[0], paged.transforms = same.q[0], same.k[0], same.v[0], same.transforms
        paged.store(0)
        found.append(paged)
    return found


@exactly
def test_block_size(dtype, kernel, formats, static):
    paged = in_blocks_of_many_sizes(dtype, formats, static)
    first, *others = [each.attend(kernel, [(0, 285, 300)])[0] for each in paged]
    assert all(torch.equal(out, first) for out in others)


@quantised
def test_whatever_is_in_slots_that_hold_nothing(dtype, kernel, formats, static):
    """As codes and as scales: some number, nothing, infinite or NaN, huge, NaN."""
    clean, parts = None, [(0, 17, 20), (1, 1, 3), (2, 47, 50)]
    for byte in (0x11, 0x00, 0x7C, 0x7B, 0x7F, 0xFF):
        paged = make_paged([20, 3, 50], dtype=dtype, formats=formats, static=static, poison=byte)
        out = torch.cat(paged.attend(kernel, few(kernel, parts, 2)))
        assert out.isfinite().all() and (clean is None or torch.equal(out, clean))
        clean = out


@once_for_all_kernels
def clean_and_poisoned(dtype, formats, static, poison):
    """Three tokens of the second are not finite."""
    clean, poisoned = (make_paged([75], dtype=dtype, formats=formats, static=static) for _ in range(2))
    k, v = clean.k[0].clone(), clean.v[0].clone()
    k[40:43], v[40:43] = poison, poison
    poisoned.store(0, k, v)
    return clean, poisoned


@quantised
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 30])
def test_what_a_row_does_not_see_adds_nothing(dtype, kernel, formats, static, poison, window):
    """Also where other tokens of the same chunk and tile are not finite: their scales are NaN."""
    paged = clean_and_poisoned(dtype, formats, static, poison)
    clean, out = (each.attend(kernel, [(0, 0, 75)], window=window)[0] for each in paged)
    assert torch.equal(out[:40], clean[:40])
    if window:
        assert torch.equal(out[72:], clean[72:])
    if formats[0] is not F.FP8_E5M2 and not static:
        assert out[43:70].isnan().all()
    elif poison != poison and (not static or formats[1] is F.FP8_E4M3):  # codes can say it
        assert out[43:70].isnan().any()


@quantised
def test_tokens_of_very_different_size(dtype, kernel, formats, static):
    """A scale each: a huge token does not blur a small one."""
    if static or F.FP8_E5M2 in formats:
        pytest.skip("has no scales of its own")
    paged = make_paged([40], dtype=dtype, formats=formats)
    v = paged.v[0].clone()
    v[20] *= 1000
    paged.store(0, None, v)
    out = paged.attend(kernel, [(0, 18, 20)])[0]
    paged.store(0)
    assert torch.equal(out, paged.attend(kernel, [(0, 18, 20)])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("formats", SAME + MIXED)
def test_ops_serve_every_format(dtype, formats):
    """Those that cannot read it say why."""
    choice = choose("paged_attention", "cpu", dtype, formats)
    assert all(reason for _, reason in choice.refused)
    paged = make_paged([40], dtype=dtype, formats=formats)
    slots = paged.tables[0].long()[torch.arange(40) // 16] * 16 + torch.arange(40) % 16
    ops.store_kv(paged.k[0], paged.v[0], paged.pages(), slots)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    out = ops.paged_attention(
        paged.q[0][-2:], paged.pages(), paged.tables, ends, torch.tensor([40], dtype=torch.int32), paged.scale
    )
    exact = plain_attention(paged.q[0][-2:].double(), *paged.read(0), paged.scale)
    assert (out - exact).abs().max() < (0.02 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("formats", SAME + MIXED)
def test_the_strongest_kernel_that_reads_the_pages_is_chosen(formats):
    for dtype in (torch.bfloat16, torch.float32):
        able = [param.id for param in kernels_for(formats) if param.values[0] is dtype]
        isa = able[-2].partition("-")[2] if len(able) > 1 else None  # the last one is the reference
        name = f"C++ {library.ISA_TITLES[isa]}" if isa else "torch reference"
        assert choose("paged_attention", "cpu", dtype, formats).name == name
