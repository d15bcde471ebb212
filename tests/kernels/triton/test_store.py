"""Pages that Triton writes: every byte is the one that the reference writes, and no other is touched."""

from dataclasses import replace

import pytest
import torch
from paged import random_transforms, rotation

from configs.kv import KVFormat, KVOrder, KVSpec, LayerKV
from kernels import reference
from kernels.ops import NO_TRANSFORM, KVTransform, LayerPages
from kernels.triton.store import store_kv

FP32, BF16, FP16 = KVFormat.FP32, KVFormat.BF16, KVFormat.FP16
E4M3, E5M2, INT8, INT4 = KVFormat.FP8_E4M3, KVFormat.FP8_E5M2, KVFormat.INT8, KVFormat.INT4
BEFORE = LayerKV(1, 32, INT4)
"""A layer in front of the one that is written: 8 bytes of scales for each slot."""


def make_spec(*formats, heads=3, dims=64, block_size=16, static=False):
    kind = LayerKV(heads, dims, formats[0], value_format=formats[-1], static=static)
    return KVSpec((BEFORE, kind), block_size, KVOrder.ROWS)


def make_kv(spec, tokens, dtype, seed=0):
    """K and V inside one buffer, NaN around them. Of quantised halves some numbers are wild, tiny, zero, -0 or not
    finite."""
    kind, generator = spec.layers[1], torch.Generator().manual_seed(seed)
    size = kind.kv_heads * kind.head_dim
    fused = torch.full((tokens, 3 * size + 5), torch.nan)
    found = []
    for start, format in ((5, kind.formats[0]), (2 * size + 5, kind.formats[1])):
        x = fused[:, start : start + size].view(tokens, kind.kv_heads, kind.head_dim)
        x.copy_(torch.randn(x.shape, generator=generator))
        for token, factor in enumerate([1e-7, 1e30, 0.0, -0.0, 1e-38, 3e3][: tokens - 1]):
            x[token] *= factor
        if format.is_quantised and tokens > 12:
            x[8, 0, 1], x[9, -1, -1], x[10], x[11, 0, -2] = torch.inf, torch.nan, 3e38, -torch.inf
            x[12, -1] = 448.0
        found.append(x)
    fused = fused.to(dtype)
    return [fused.as_strided(x.shape, x.stride(), x.storage_offset()) for x in found]


def make_slots(spec, tokens, seed=0):
    """Of blocks that lie anywhere; every seventh token has none."""
    slots = torch.randperm(2 * tokens + 1, generator=torch.Generator().manual_seed(seed))[:tokens]
    slots[3::7] = -1
    return slots, 2 * tokens // spec.block_size + 1


def empty(spec, blocks, transforms=(NO_TRANSFORM, NO_TRANSFORM)):
    return LayerPages(torch.full((blocks, spec.block_bytes), 0xAB, dtype=torch.uint8), spec, 1, *transforms)


def another(pages):
    return replace(pages, pool=torch.full_like(pages.pool, 0xAB))


def assert_like_the_reference(spec, k, v, slots, blocks, transforms=(NO_TRANSFORM, NO_TRANSFORM)):
    found = empty(spec, blocks, transforms)
    expected = another(found)
    reference.store_kv(k, v, expected, slots)
    store_kv(k, v, found, slots)
    where = (found.pool != expected.pool).nonzero()
    assert not len(where), (where, found.pool[*where.T], expected.pool[*where.T])
    return found


def fitted(spec, *, centred=True, fed_back=True):
    k, v = random_transforms(spec.layers[1], torch.Generator().manual_seed(1), centred)
    return (k if fed_back else replace(k, feedback=None)), v


@pytest.mark.parametrize(
    ("dtype", "formats", "shape"),
    [
        (torch.bfloat16, (BF16,), {}),
        (torch.float32, (FP32,), {"heads": 1, "dims": 40}),
        (torch.float16, (FP16,), {"heads": 4, "dims": 128, "block_size": 32}),
        (torch.bfloat16, (FP32, FP16), {"dims": 6, "block_size": 4}),
        (torch.float32, (BF16, FP16), {"dims": 2, "block_size": 6}),
        (torch.float16, (BF16, FP32), {"heads": 7, "dims": 80}),
    ],
)
def test_numbers_are_stored_as_they_are(dtype, formats, shape):
    spec = make_spec(*formats, **shape)
    k, v = make_kv(spec, 37, dtype)
    slots, blocks = make_slots(spec, 37)
    assert_like_the_reference(spec, k, v, slots, blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_not_a_number_keeps_its_bits(dtype):
    format = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}[dtype]
    spec = make_spec(format, heads=1, dims=8, block_size=2)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    k = torch.tensor([-1, -2, torch.iinfo(bits).max, 0, 1, -torch.iinfo(bits).max - 1, 5, 6], dtype=bits).view(dtype)
    k = k.view(1, 1, 8)
    assert k.isnan().any()
    assert_like_the_reference(spec, k, k.flip(2), torch.tensor([1]), 1)


@pytest.mark.parametrize(
    ("dtype", "formats", "shape"),
    [
        (torch.bfloat16, (E5M2, E4M3), {}),
        (torch.float32, (E4M3, INT8), {"heads": 7, "dims": 80, "block_size": 32}),
        (torch.float16, (INT8, BF16), {"heads": 1, "dims": 30}),
        (torch.bfloat16, (INT4, INT4), {"dims": 96}),
        (torch.bfloat16, (INT8, INT4), {"heads": 1, "dims": 128, "block_size": 32}),
        (torch.float32, (FP32, E5M2), {"heads": 4, "dims": 6, "block_size": 4}),
        (torch.float32, (INT4, FP16), {"heads": 2, "dims": 32, "block_size": 4}),
    ],
)
def test_codes_are_the_references(dtype, formats, shape):
    spec = make_spec(*formats, **shape)
    k, v = make_kv(spec, 37, dtype)
    slots, blocks = make_slots(spec, 37)
    assert_like_the_reference(spec, k, v, slots, blocks)


@pytest.mark.parametrize(
    ("dtype", "formats", "shape"),
    [
        (torch.bfloat16, (INT8, E4M3), {"dims": 40}),
        (torch.float32, (E4M3, BF16), {"heads": 1, "block_size": 32}),
        (torch.float16, (INT4, INT8), {"dims": 32}),
        (torch.bfloat16, (E5M2, INT8), {"dims": 6}),
    ],
)
def test_static_scales_divide_each_channel(dtype, formats, shape):
    spec = make_spec(*formats, **shape, static=True)
    k, v = make_kv(spec, 20, dtype)
    slots, blocks = make_slots(spec, 20)
    transforms = random_transforms(spec.layers[1], torch.Generator().manual_seed(1))
    assert_like_the_reference(spec, k, v, slots, blocks, transforms)


@pytest.mark.parametrize(
    ("dtype", "formats", "shape", "fit"),
    [
        (torch.bfloat16, (INT8, INT4), {"heads": 2, "dims": 32}, {}),
        (torch.float16, (E4M3, BF16), {"heads": 1, "dims": 40, "block_size": 32}, {"centred": False}),
        (torch.float32, (INT4, E4M3), {"heads": 1, "dims": 96}, {}),
        (torch.bfloat16, (INT4, INT8), {"dims": 64}, {"fed_back": False}),
        (torch.float32, (E4M3, E5M2), {"dims": 128}, {"fed_back": False, "centred": False}),
    ],
)
def test_fitted_keys_are_the_references(dtype, formats, shape, fit):
    spec = make_spec(*formats, **shape)
    k, v = make_kv(spec, 20, dtype)
    slots, blocks = make_slots(spec, 20)
    assert_like_the_reference(spec, k, v, slots, blocks, fitted(spec, **fit))


@pytest.mark.parametrize(("format", "feedback"), [(INT4, None), (E4M3, torch.zeros(1, 32, 32))])
def test_zeros_of_either_sign(format, feedback):
    """Rotated, each token is one -0 among many 0."""
    spec = make_spec(format, heads=1, dims=32)
    k = (rotation(32).sign() * -0.0).float().unsqueeze(1)
    transforms = KVTransform(None, None, feedback), NO_TRANSFORM
    assert_like_the_reference(spec, k, k, torch.arange(32), 2, transforms)


def test_feedback_does_not_run_away():
    spec = make_spec(INT8, heads=1, dims=32)
    k = torch.randn(4, 1, 32, generator=torch.Generator().manual_seed(0)) * 1e30
    feedback = KVTransform(None, None, torch.full((1, 32, 32), 1e3))
    assert_like_the_reference(spec, k, k, torch.arange(4), 1, (feedback, NO_TRANSFORM))


@pytest.mark.parametrize("formats", [(BF16, INT4), (E4M3, INT8)])
def test_a_token_is_stored_alone_as_in_company(formats):
    spec = make_spec(*formats, dims=32)
    tokens = 70  # a tile is 64
    k, v = make_kv(spec, tokens, torch.bfloat16)
    slots, blocks = make_slots(spec, tokens)
    together = assert_like_the_reference(spec, k, v, slots, blocks, fitted(spec, fed_back=False))
    alone = another(together)
    some = (0, 6, 10, 63, 64)
    for token in some:
        one = slice(token, token + 1)
        store_kv(k[one], v[one], alone, slots[one])
    written = alone.pool != 0xAB
    assert torch.equal(alone.pool[written], together.pool[written])
    missing = [token for token in range(tokens) if token not in some]
    store_kv(k[missing], v[missing], alone, slots[missing])
    assert torch.equal(alone.pool, together.pool)


def test_no_token_and_no_slot():
    spec = make_spec(INT4)
    k, v = make_kv(spec, 3, torch.bfloat16)
    pages = empty(spec, 2)
    store_kv(k[:0], v[:0], pages, torch.zeros(0, dtype=torch.int64))
    store_kv(k, v, pages, torch.full((3,), -1))
    assert (pages.pool == 0xAB).all()


def test_offsets_beyond_32_bits(far_memory):
    spec = make_spec(INT4, BF16, heads=1, dims=32)
    blocks = 2**33 // spec.block_bytes + 3
    far = LayerPages(far_memory(blocks * spec.block_bytes).view(blocks, -1), spec, 1)
    apart = 2**31 // 3 * 2  # numbers between tokens: the third is 2 x this away
    memory = far_memory(2 * (2 * apart + 64)).view(torch.bfloat16)
    k, v = (memory.as_strided((3, 1, 32), (apart, 32, 1), start) for start in (0, 32))
    k.copy_(torch.randn(3, 1, 32)), v.copy_(torch.randn(3, 1, 32))
    near = empty(spec, 1)
    reference.store_kv(k.clone(), v.clone(), near, torch.tensor([0, 3, 15]))
    store_kv(k, v, far, (blocks - 1) * 16 + torch.tensor([0, 3, 15]))
    written = near.pool[0] != 0xAB
    assert written.sum() > 3 * 32 and torch.equal(far.pool[-1][written], near.pool[0][written])


def test_other_orders_are_refused():
    spec = KVSpec((LayerKV(1, 8, BF16),), 4)
    pages = LayerPages(torch.zeros(1, spec.block_bytes, dtype=torch.uint8), spec, 0)
    with pytest.raises(AssertionError):
        store_kv(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), pages, torch.zeros(1, dtype=torch.int64))
