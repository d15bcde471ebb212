"""What K and V become in each format: the nearest codes, errors within bounds, nothing that spreads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import rotation

from configs.kv import KVFormat, LayerKV
from kernels.ops import NO_TRANSFORM, KVTransform, compute_dtype
from kernels.reference import kv_formats
from kernels.reference.kv_formats import decode_int4, encode, rotate, signs, unrotate

CPU = torch.device("cpu")
QUANTISED = [format for format in KVFormat if format.is_quantised]
SMALL_FLOATS = {KVFormat.FP8_E4M3: torch.float8_e4m3fn, KVFormat.FP8_E5M2: torch.float8_e5m2}


def read(encoded, kind, format, channels=None):
    """What the codes of a token and head stand for."""
    if format is KVFormat.INT4:
        x = decode_int4(encoded.codes, encoded.scales, encoded.zeros)
    else:
        x = encoded.codes.float() * (1 if encoded.scales is None else encoded.scales.float())
    if kind.is_rotated(format):
        x = unrotate(x)
    return x if channels is None else x * channels


def stored(x, format, channels=None):
    """x [tokens, heads, dims], stored and read. channels: static scales."""
    kind = LayerKV(x.shape[1], x.shape[2], format, static=channels is not None)
    return read(encode(x, kind, format, KVTransform(channels)), kind, format, channels)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ the rotation
@pytest.mark.parametrize("dims", [2, 6, 40, 64, 80, 96, 128, 256])
def test_rotation_is_signs_and_hadamard_and_is_undone(dims):
    x = random(5, 3, dims)
    torch.testing.assert_close(rotate(x).double(), x.double() @ rotation(dims).T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unrotate(rotate(x)), x, atol=1e-5, rtol=1e-5)
    identity = torch.eye(dims, dtype=torch.float64)
    torch.testing.assert_close(rotation(dims) @ rotation(dims).T, identity, atol=1e-12, rtol=0)


def test_signs_are_part_of_the_format():
    """Other ones would not read what is on disk, or what a peer has written."""
    first = [
        1,
        -1,
        1,
        1,
        1,
        -1,
        1,
        1,
        -1,
        -1,
        1,
        1,
        1,
        1,
        1,
        1,
        -1,
        -1,
        -1,
        1,
        -1,
        -1,
        1,
        -1,
        -1,
        -1,
        1,
        1,
        -1,
        1,
        -1,
        -1,
    ]
    assert signs(32, CPU).tolist() == first and signs(32, CPU) is signs(32, CPU)
    assert signs(512, CPU)[:32].tolist() == first
    assert abs(signs(512, CPU).sum()) < 60


# ------------------------------------------------------------------ the nearest code
@pytest.mark.parametrize("format", SMALL_FLOATS)
def test_small_floats_are_the_nearest_ties_even_and_saturate(format):
    """Against all numbers of the format, in fp64."""
    codes = torch.arange(256, dtype=torch.uint8).view(SMALL_FLOATS[format])
    numbers = codes.double()[codes.double().isfinite()].unique()
    middles = ((numbers[1:] + numbers[:-1]) / 2).float()  # exact in fp32
    up, down = (middles.nextafter(torch.tensor(end)) for end in (1e9, -1e9))
    wild = random(4096) * torch.logspace(-12, 12, 4096)
    x = torch.cat([numbers.float(), middles, up, down, wild, torch.tensor([1e38, -math.inf, math.inf, 449.0, 480.0])])
    kind = LayerKV(1, len(x), format, static=format.may_be_static)
    channels = torch.ones(1, len(x)) if kind.static else None
    found = encode(x.view(1, 1, -1), kind, format, KVTransform(channels)).codes.flatten()
    distance = (x.double().clamp(numbers[0], numbers[-1])[:, None] - numbers).abs()
    assert torch.equal((x.double().clamp(numbers[0], numbers[-1]) - found.double()).abs(), distance.min(1).values)
    ties = (distance == distance.min(1).values[:, None]).sum(1) == 2
    assert ties.sum() > 200 and not (found.view(torch.uint8)[ties] & 1).any()
    one = KVTransform(None if channels is None else channels[:, :1])
    nan = encode(torch.tensor([[[-math.nan]]]), LayerKV(1, 1, format, static=kind.static), format, one)
    assert nan.codes.view(torch.uint8).item() == 0x7F


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([KVFormat.INT8, KVFormat.FP8_E4M3]), st.integers(-16, 16), st.integers(0, 2**31))
def test_a_scale_of_its_own_fits_the_largest_number(format, exponent, seed):
    """Written in fp64: the scale is amax / largest to fp16's precision, and codes are the nearest."""
    x = random(1, 1, 64, seed=seed) * 2.0**exponent
    kind = LayerKV(1, 64, format)
    encoded = encode(x, kind, format, NO_TRANSFORM)
    y = (rotate(x) if kind.is_rotated(format) else x).double()
    largest = {KVFormat.INT8: 127, KVFormat.FP8_E4M3: 448}[format]
    expected = (y.abs().max() / largest).clamp(kv_formats.LEAST_SCALE, 65504.0).item()
    scale = encoded.scales.double().item()
    assert abs(scale - expected) <= expected * 2**-11 + 2**-25
    codes, exact = encoded.codes.double(), (y / scale).clamp(-largest, largest)
    step = 0.5 if format is KVFormat.INT8 else (exact.abs() * 2**-4).clamp(min=2**-10)
    assert ((codes - exact).abs() <= step * (1 + 1e-6)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(-14, 10), st.floats(-5, 5), st.integers(0, 2**31))
def test_int4_spans_each_group(exponent, shift, seed):
    x = (random(1, 2, 96, seed=seed) + shift) * 2.0**exponent
    kind = LayerKV(2, 96, KVFormat.INT4)
    encoded = encode(x, kind, KVFormat.INT4, NO_TRANSFORM)
    assert encoded.scales.shape == encoded.zeros.shape == (1, 2, 3) and encoded.codes.max() <= 15
    y, scale = rotate(x).unflatten(-1, (3, 32)).double(), encoded.scales.double()
    zero = encoded.zeros.double()
    least, most = y.amin(-1), y.amax(-1)
    assert ((zero - least).abs() <= least.abs() * 2**-11 + 2**-25).all()
    expected = ((most - least) / 15).clamp(min=kv_formats.LEAST_SCALE)
    assert ((scale - expected).abs() <= expected * 2**-11 + 2**-25).all()
    exact = ((y - zero[..., None]) / scale[..., None]).clamp(0, 15)
    assert ((encoded.codes.view(1, 2, 3, 32).double() - exact).abs() <= 0.5 + 1e-5).all()


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize("dims", [64, 96, 128])
@pytest.mark.parametrize(
    ("format", "bound"),
    [(KVFormat.FP8_E4M3, 0.027), (KVFormat.FP8_E5M2, 0.055), (KVFormat.INT8, 0.008), (KVFormat.INT4, 0.095)],
)
def test_error_of_a_round_trip(format, bound, dims):
    x = random(200, 2, dims)
    error = (stored(x, format) - x).norm() / x.norm()
    assert bound / 2 < error < bound


@pytest.mark.parametrize(
    ("format", "relative", "static"),
    [(KVFormat.FP8_E4M3, 2**-4, False), (KVFormat.FP8_E4M3, 2**-4, True), (KVFormat.FP8_E5M2, 2**-3, False)],
)
def test_a29_heavy_tails_keep_the_formats_precision(format, relative, static):
    """The error is that of the format, not that of clipping, and nothing overflows: of each number, or where they are
    rotated of each head."""
    k = random(400, 2, 64) ** 5
    k *= 3000 / k.abs().max()
    y = stored(k, format, (k.abs().amax(0) / 448) if static else None)
    assert y.isfinite().all()
    if LayerKV(2, 64, format, static=static).is_rotated(format):
        assert ((y - k).norm(dim=-1) <= relative * k.norm(dim=-1)).all()
    else:
        big = k.abs() > k.abs().amax(0 if static else -1, keepdim=True) * 2**-6
        assert ((y - k).abs()[big] <= relative * k.abs()[big] * 1.01).all()


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a29_every_amplitude_is_finite(format, dtype):
    for amax in (0.0, 1e-38, 1e-6, 1.0, 448.0, 449.0, 1e4, 1e30, 3e38 / 64):
        y = stored(torch.full((1, 1, 64), amax, dtype=dtype), format)
        assert y.isfinite().all(), amax
        assert amax > 1e4 or (y - amax).norm() <= max(amax, 1e-3) * 8 * 0.125, amax


@pytest.mark.parametrize(("format", "bound"), [(KVFormat.INT8, 0.02), (KVFormat.INT4, 0.25)])
def test_a30_an_outlier_channel_does_not_flatten_the_others(format, bound, monkeypatch):
    k = random(500, 2, 64)
    k[..., 3] *= 40

    def errors():
        """Of each channel, relative."""
        return (stored(k, format) - k).square().mean((0, 1)).sqrt() / k.square().mean((0, 1)).sqrt()

    rotated, others = errors(), [d for d in range(64) if d != 3]
    assert rotated.median() < bound and rotated[others].median() < bound and rotated.max() < 1.2 * bound
    monkeypatch.setattr(kv_formats, "rotate", lambda x: x)
    monkeypatch.setitem(globals(), "unrotate", lambda x: x)
    assert errors().max() > 3 * rotated.max()


@pytest.mark.parametrize(("format", "bound"), [(KVFormat.INT8, 0.006), (KVFormat.INT4, 0.11)])
def test_a30_zeros_and_constants(format, bound):
    assert stored(torch.zeros(1, 1, 64), format).abs().max() == 0
    constant = stored(torch.full((3, 2, 64), 7.0), format) - 7
    assert constant.square().mean().sqrt() / 7 < bound
    no_range = torch.full((1, 1, 64), 7.0)  # as it is rotated
    assert (rotate(stored(unrotate(no_range), format)) - no_range).abs().max() < 7 * 2**-10


# ------------------------------------------------------------------ what is not finite
@pytest.mark.parametrize("format", [KVFormat.FP8_E4M3, KVFormat.INT8, KVFormat.INT4])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3.4e38])
def test_what_is_not_finite_reads_as_nan_and_nobody_else_notices(format, bad):
    x = random(4, 3, 64)
    clean = stored(x, format)
    x[2, 1, 5] = bad
    if bad == 3.4e38:
        x[2, 1] = bad  # its rotation overflows
        if format is KVFormat.FP8_E4M3:
            x[2, 1, 7] = math.nan
    y = stored(x, format)
    assert y[2, 1].isnan().all()
    y[2, 1] = clean[2, 1]
    assert torch.equal(y, clean)
    encoded = encode(x, LayerKV(3, 64, format), format, NO_TRANSFORM)
    assert not encoded.codes[2, 1].view(torch.uint8).any() and encoded.scales[2, 1].isnan().all()


def test_groups_of_other_rotation_blocks_do_not_notice_either():
    """96 = 3 blocks of 32: what goes wrong in one stays there."""
    x = random(1, 1, 96)
    x[..., 40] = math.inf
    y = stored(x, KVFormat.INT4)
    assert y[..., 32:64].isnan().all() and y[..., :32].isfinite().all() and y[..., 64:].isfinite().all()


def test_formats_without_scales():
    """e5m2 has a NaN of its own; static int8 has none."""
    x = torch.tensor([[[math.nan, math.inf, -math.inf, 1.0]]])
    assert stored(x, KVFormat.FP8_E5M2).flatten().nan_to_num(-1).tolist() == [-1, 57344, -57344, 1]
    ones = torch.ones(1, 4)
    assert stored(x, KVFormat.INT8, ones).flatten().tolist() == [0, 127, -127, 1]
    assert stored(x, KVFormat.FP8_E4M3, ones).flatten().nan_to_num(-1).tolist() == [-1, 448, -448, 1]


# ------------------------------------------------------------------ fitted keys
SCALED = [KVFormat.FP8_E4M3, KVFormat.INT8, KVFormat.INT4]


@pytest.mark.parametrize("format", SCALED)
def test_centre_and_channels_are_those_of_what_is_stored(format):
    """Keys that are centred and divided beforehand get the same codes."""
    x, centre, channels = random(50, 2, 64) * 3, random(2, 64, seed=1), random(2, 64, seed=2).abs() + 0.1
    kind = LayerKV(2, 64, format)
    found = encode(x, kind, format, KVTransform(channels, centre))
    by_hand = encode((x - centre) / channels, kind, format, NO_TRANSFORM)
    assert torch.equal(found.codes.view(torch.uint8), by_hand.codes.view(torch.uint8))
    assert torch.equal(found.scales, by_hand.scales)
    stands_for = read(found, kind, format, channels) + centre
    error = (stands_for - x) / channels
    assert error.norm() / ((x - centre) / channels).norm() < (0.1 if format is KVFormat.INT4 else 0.03)


@pytest.mark.parametrize("format", SCALED)
def test_feedback_hands_each_dims_error_on_to_later_ones(format):
    """In fp64, from the definition: dim by dim on the grid that the key as a whole has got."""
    kind, groups = LayerKV(1, 64, format), 2 if format is KVFormat.INT4 else 1
    x, feedback = random(1, 1, 64), random(1, 64, 64, seed=1) / 8
    plain, found = (
        encode(x, kind, format, transform) for transform in (NO_TRANSFORM, KVTransform(None, None, feedback))
    )
    assert torch.equal(found.scales, plain.scales) and not torch.equal(found.codes.float(), plain.codes.float())
    scales = found.scales.double().flatten().repeat_interleave(64 // groups)
    zeros = 0 * scales if found.zeros is None else found.zeros.double().flatten().repeat_interleave(64 // groups)
    left = (rotate(x) if kind.is_rotated(format) else x).double().flatten()
    largest = 15 if format is KVFormat.INT4 else kv_formats.LARGEST[format]
    steps = {KVFormat.INT8: 1.0, KVFormat.INT4: 1.0, KVFormat.FP8_E4M3: 32.0}[format]
    for dim in range(64):
        exact = ((left[dim] - zeros[dim]) / scales[dim]).clamp(0 if format is KVFormat.INT4 else -largest, largest)
        code = found.codes.double().flatten()[dim]
        step = max(abs(exact) * 2**-4, 2**-10) if format is KVFormat.FP8_E4M3 else 0.5
        assert abs(code - exact) <= step + 1e-4, dim
        error = (left[dim] - code * scales[dim] - zeros[dim]).clamp(-steps * scales[dim], steps * scales[dim])
        left[dim + 1 :] -= error * feedback[0, dim, dim + 1 :].double()


def test_feedback_does_not_run_away():
    """However much an error is blown up on its way: what the codes cannot follow is cut off, and all stays finite."""
    x, feedback = random(20, 2, 64) * 1e30, torch.full((2, 64, 64), 1e3)
    for format in SCALED:
        encoded = encode(x, LayerKV(2, 64, format), format, KVTransform(None, None, feedback))
        assert encoded.codes.float().isfinite().all() and encoded.scales.isfinite().all()


def test_a_group_that_is_not_finite_takes_no_part_in_feedback():
    x, feedback = random(1, 1, 96), random(1, 96, 96, seed=1) / 8
    transform = KVTransform(None, None, feedback)
    clean = encode(x, LayerKV(1, 96, KVFormat.INT4), KVFormat.INT4, transform)
    x[..., 40] = math.nan
    bad = encode(x, LayerKV(1, 96, KVFormat.INT4), KVFormat.INT4, transform)
    assert torch.equal(bad.codes[..., :32], clean.codes[..., :32]) and not bad.codes[..., 32:64].any()
    assert bad.scales[..., 1].isnan().all() and bad.scales[..., ::2].isfinite().all()


def test_the_least_scale_has_all_digits_of_fp16():
    assert torch.finfo(torch.float16).smallest_normal == kv_formats.LEAST_SCALE


# ------------------------------------------------------------------ the rest
@pytest.mark.parametrize("format", [KVFormat.INT8, KVFormat.FP8_E4M3])
def test_static_scales_divide_each_channel(format):
    x, channels = random(50, 3, 40), torch.rand(3, 40) + 0.01
    channels /= 30
    kind = LayerKV(3, 40, format, static=True)
    encoded = encode(x, kind, format, KVTransform(channels))
    assert encoded.scales is None and not kind.is_rotated(format)
    plain = encode(x / channels, kind, format, KVTransform(torch.ones(3, 40)))
    assert torch.equal(encoded.codes.view(torch.uint8), plain.codes.view(torch.uint8))
    fits = (x / channels).abs() <= kv_formats.LARGEST[format]
    error = (read(encoded, kind, format, channels) - x).abs()
    assert (error[fits] <= ((channels * 0.5).clamp(min=0) + x.abs() * 2**-4).expand_as(x)[fits]).all()


@pytest.mark.parametrize("dims", [32, 96])
def test_two_int4_codes_share_a_byte(dims):
    codes = torch.randint(0, 16, (3, 2, dims), dtype=torch.uint8)
    assert torch.equal(kv_formats.unpack_k(kv_formats.pack_k(codes)), codes)
    assert torch.equal(kv_formats.unpack_v(kv_formats.pack_v(codes)), codes)
    assert (kv_formats.pack_k(codes)[..., 5] == codes[..., 10] + 16 * codes[..., 11]).all()
    assert (kv_formats.pack_v(codes)[..., 5] == codes[..., 5] + 16 * codes[..., 21]).all()
    if dims > 32:
        assert (kv_formats.pack_v(codes)[..., 16] == codes[..., 32] + 16 * codes[..., 48]).all()


def test_a_row_is_encoded_alone():
    x = random(9, 2, 64)
    for format in KVFormat:
        kind = LayerKV(2, 64, format)
        all_rows, last = encode(x, kind, format, NO_TRANSFORM), encode(x[8:], kind, format, NO_TRANSFORM)
        assert torch.equal(all_rows.codes[8:].view(torch.uint8), last.codes.view(torch.uint8))
        assert last.scales is None or torch.equal(all_rows.scales[8:], last.scales)


def test_in_which_format_attention_computes():
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert compute_dtype(bf16, (KVFormat.BF16, KVFormat.BF16)) is bf16
    assert {compute_dtype(bf16, (format, KVFormat.BF16)) for format in QUANTISED} == {bf16}
    for format in QUANTISED:
        assert compute_dtype(fp32, (format, format)) is compute_dtype(fp16, (format, format)) is fp32
    for wide in (KVFormat.FP32, KVFormat.FP16):
        assert compute_dtype(bf16, (wide, KVFormat.INT8)) is compute_dtype(bf16, (KVFormat.BF16, wide)) is fp32
