"""Writing pages in every format, and copying blocks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import FORMATS, make_paged, random_transforms

from configs.kv import KVFormat, KVSpec, LayerKV
from kernels import ops, reference
from kernels.cpu import library
from kernels.cpu import store as native
from kernels.cpu.offers import KINDS
from kernels.ops import NO_TRANSFORM
from kernels.reference import kv_formats

found = library.load()
COPIES = [pytest.param(reference.copy_blocks, id="reference")]
if found:
    COPIES.append(pytest.param(native.native_copy(found), id="native"))
NATIVE = [
    pytest.param(dtype, native.native_store(found, f"{KINDS[dtype]}_{isa}"), id=f"{KINDS[dtype]}-{isa}")
    for dtype, isas in native.ISAS.items()
    for isa in isas
    if found and found.refusal(f"store_kv_{KINDS[dtype]}", isa) is None
]
STORES = [*NATIVE, *(pytest.param(dtype, reference.store_kv, id=f"{dtype}-reference") for dtype in FORMATS)]
QUANTISED = [format for format in KVFormat if format.is_quantised]


def number_at(pool, spec, layer, part, block, index, dtype):
    """One number of a block by the layout's arithmetic alone: part 0 is K, 1 is V; index as in `configs.kv`."""
    shape = spec.halves[layer][part].codes.shape
    flat = 0
    for size, i in zip(shape, index, strict=True):
        flat = flat * size + i
    offset = spec.halves[layer][part].codes.offset + flat * dtype.itemsize
    return pool[block, offset : offset + dtype.itemsize].clone().view(dtype).item()


@pytest.mark.parametrize(("dtype", "store"), STORES)
def test_every_number_lands_where_the_layout_says(dtype, store):
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


@pytest.mark.parametrize(("dtype", "store"), STORES)
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "head_dim", "block_size"), [(1, 3, 64, 16), (300, 3, 64, 16), (70, 2, 40, 6)]
)
def test_views_of_a_fused_buffer_and_skipped_slots(dtype, store, tokens, kv_heads, head_dim, block_size):
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


@pytest.mark.parametrize("which", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("dtype", "store"), STORES)
def test_every_code_and_scale_lands_where_the_layout_says(dtype, store, format, which):
    kind = LayerKV(3, 64, format)
    spec = KVSpec((LayerKV(2, 32, KVFormat.INT4), kind), 4)
    pool = torch.full((3, spec.block_bytes), 0xAB, dtype=torch.uint8)
    k, v = torch.randn(2, 2, 3, 64).to(dtype)
    store(k, v, ops.LayerPages(pool, spec, 1), torch.tensor([2 * 4 + 3, 0 * 4 + 2]))
    encoded, half = kv_formats.encode((k, v)[which], kind, format, NO_TRANSFORM), spec.halves[1][which]
    codes = encoded.codes.view(torch.uint8)

    def byte(block, part, *index, size=1):
        flat = 0
        for length, i in zip(part.shape, index, strict=True):
            flat = flat * length + i
        return pool[block, part.offset + flat * size : part.offset + (flat + 1) * size].clone()

    for token, (block, offset) in enumerate([(2, 3), (0, 2)]):
        for head, d in itertools.product(range(3), range(64)):
            if format is not KVFormat.INT4:
                at = (head, d, offset, 0) if which == 0 else (head, offset, d, 0)
                assert byte(block, half.codes, *at) == codes[token, head, d]
                continue
            place, high = (d // 2, d % 2) if which == 0 else (d // 32 * 16 + d % 16, d % 32 // 16)
            both = byte(block, half.codes, *((head, place, offset) if which == 0 else (head, offset, place)))
            assert both >> 4 * high & 15 == codes[token, head, d]
        for part, numbers in ((half.scales, encoded.scales), (half.zeros, encoded.zeros)):
            assert (part is None) == (numbers is None)
            for head, group in itertools.product(range(3), range(0 if part is None else part.shape[1])):
                here = byte(block, part, head, group, offset, size=2).view(torch.float16)
                assert here == numbers[token, head, group]


@st.composite
def layers_with_tokens(draw, dtype):
    """-> (spec of one layer, transforms of K and V, k, v, slots)"""
    formats = draw(st.tuples(*[st.sampled_from(KVFormat)] * 2))
    dims = draw(st.sampled_from([32, 64, 96, 128] if KVFormat.INT4 in formats else [6, 30, 40, 64, 80, 96]))
    static = draw(st.booleans()) and any(format.may_be_static for format in formats)
    kind = LayerKV(draw(st.integers(1, 3)), dims, formats[0], value_format=formats[1], static=static)
    spec = KVSpec((kind,), draw(st.sampled_from([4, 16, 32])))
    tokens, seed = draw(st.integers(1, 8)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    shape = tokens, kind.kv_heads, dims
    kv, plain = torch.randn(2, *shape, generator=generator), all(not format.is_quantised for format in formats)
    for _ in range(draw(st.integers(0, 4))):
        token, head, dim = (int(torch.randint(0, size, (1,), generator=generator)) for size in shape)
        where = draw(st.sampled_from([(slice(None), token, head), (slice(None), token, head, dim)]))
        kv[where] *= draw(st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1e-6, 40.0, 3e3, 1e30, 3e38]))
        if not plain and draw(st.booleans()):
            kv[where] = draw(st.sampled_from([float("inf"), float("-inf"), 448.0, 1.0, -1.0]))
    if draw(st.booleans()):
        kv[0, 0, 0, -1], kv[1, -1, -1, 0] = float("nan"), -float("nan")
    k, v = kv.to(dtype)
    transforms = random_transforms(kind, generator)
    if not static and draw(st.booleans()):
        transforms = NO_TRANSFORM, NO_TRANSFORM
    slots = torch.randperm(2 * spec.block_size, generator=generator)[:tokens]
    slots[tokens // 2] = draw(st.sampled_from([-1, int(slots[tokens // 2])]))
    # which NaN an unquantised half gets is the machine's affair
    k, v = (
        x if form.is_quantised else x.nan_to_num(1.0, torch.inf, -torch.inf)
        for x, form in zip((k, v), formats, strict=True)
    )
    return spec, transforms, k, v, slots


@pytest.mark.skipif(found is None, reason="no native library")
@pytest.mark.parametrize("dtype", list(native.ISAS))
def test_native_codes_and_scales_are_the_references_bit_for_bit(dtype):
    """On every instruction set that this machine has."""
    stores = {param.id: param.values[1] for param in NATIVE if param.values[0] is dtype}

    @settings(max_examples=250, deadline=None)
    @given(layers_with_tokens(dtype))
    def check(case):
        spec, transforms, k, v, slots = case
        empty = torch.full((2, spec.block_bytes), 0xAB, dtype=torch.uint8)
        expected = empty.clone()
        reference.store_kv(k, v, ops.LayerPages(expected, spec, 0, *transforms), slots)
        for name, store in stores.items():
            pool = empty.clone()
            store(k, v, ops.LayerPages(pool, spec, 0, *transforms), slots)
            assert torch.equal(pool, expected), (name, (pool != expected).nonzero())

    check()


@pytest.mark.parametrize(("dtype", "store"), NATIVE)
@pytest.mark.parametrize("format", QUANTISED)
def test_a_long_chunk_on_several_threads(dtype, store, format):
    spec = KVSpec((LayerKV(3, 64, format),) * 2, 16)
    k, v = torch.randn(2, 700, 3, 64).to(dtype)
    pool = torch.zeros(50, spec.block_bytes, dtype=torch.uint8)
    expected, slots = pool.clone(), torch.randperm(800)[:700]
    transforms = random_transforms(spec.layers[1], torch.Generator().manual_seed(0))
    store(k, v, ops.LayerPages(pool, spec, 1, *transforms), slots)
    reference.store_kv(k, v, ops.LayerPages(expected, spec, 1, *transforms), slots)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("format", QUANTISED)
def test_copies_carry_codes_and_scales(copy, format):
    paged = make_paged([30], formats=(format, format))
    before = paged.read(0)
    free = [block for block in range(len(paged.pool)) if block not in paged.tables[0, :2].tolist()]
    copy(paged.pool, list(zip(paged.tables[0, :2].tolist(), free[:2], strict=True)))
    paged.pool[paged.tables[0, :2].long()] = 0xFF
    paged.tables[0, :2] = torch.tensor(free[:2])
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(before, paged.read(0), strict=True))


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
        lambda: ops.store_kv(k, k.float(), pages, slots),
        lambda: ops.store_kv(k.int(), k.int(), pages, slots),
        lambda: ops.store_kv(k, k[:2], pages, slots),
        lambda: ops.store_kv(k, k, pages, slots.int()),
        lambda: ops.store_kv(k.transpose(1, 2).contiguous().transpose(1, 2), k, pages, slots),
        lambda: ops.LayerPages(pool.view(4, -1), spec, 0),
        lambda: ops.LayerPages(pool, spec, 0, ops.KVTransform(torch.ones(2, 8))),
        lambda: ops.copy_blocks(pool.float(), [(0, 1)]),
    ):
        with pytest.raises(AssertionError):
            broken()


def test_static_scales_are_given_where_they_belong_and_nowhere_else():
    spec = KVSpec((LayerKV(2, 8, KVFormat.INT8, value_format=KVFormat.FP8_E5M2, static=True),), 4)
    pool, channels = torch.zeros(2, spec.block_bytes, dtype=torch.uint8), torch.ones(2, 8)
    none, static = ops.KVTransform(), ops.KVTransform(channels)
    ops.LayerPages(pool, spec, 0, static)
    for wrong in (
        (none, none),
        (static, static),
        (none, static),
        *[
            (ops.KVTransform(x), none)
            for x in (channels[:1], channels.half(), channels.to("meta"), torch.ones(8, 2).T, channels[None])
        ],
        (ops.KVTransform(channels, channels), none),
        (ops.KVTransform(channels, None, torch.ones(2, 8, 8)), none),
    ):
        with pytest.raises(AssertionError):
            ops.LayerPages(pool, spec, 0, *wrong)


@pytest.mark.parametrize("format", QUANTISED)
def test_keys_are_fitted_where_they_have_scales_of_their_own_and_values_never(format):
    spec = KVSpec((LayerKV(2, 32, format),), 4)
    pool, x, square = torch.zeros(2, spec.block_bytes, dtype=torch.uint8), torch.ones(2, 32), torch.ones(2, 32, 32)
    none = ops.KVTransform()
    for fitted in (
        ops.KVTransform(x),
        ops.KVTransform(None, x),
        ops.KVTransform(None, None, square),
        ops.KVTransform(x, x, square),
    ):
        if format is KVFormat.FP8_E5M2:
            with pytest.raises(AssertionError):
                ops.LayerPages(pool, spec, 0, fitted)
        else:
            ops.LayerPages(pool, spec, 0, fitted)
        with pytest.raises(AssertionError):
            ops.LayerPages(pool, spec, 0, none, fitted)
    with pytest.raises(AssertionError):
        ops.LayerPages(pool, spec, 0, ops.KVTransform(None, None, x))
