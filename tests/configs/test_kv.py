"""The layout of a block: every byte of every layer in a place of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.kv import PAGE, KVFormat, KVLayout, KVSpec, LayerKV, WindowPages

formats = st.sampled_from([form for form in KVFormat if form is not KVFormat.INT4])
layers = st.builds(
    LayerKV,
    st.integers(1, 12),
    st.sampled_from([4, 6, 30, 64, 90, 96, 128, 256]),
    formats,
    value_format=st.none() | formats,
) | st.builds(
    LayerKV,
    st.integers(1, 12),
    st.sampled_from([32, 64, 96, 128, 256]),
    st.sampled_from(KVFormat),
    value_format=st.none() | st.sampled_from(KVFormat),
)


@given(st.lists(layers, min_size=1, max_size=30), st.sampled_from([2, 4, 6, 8, 16, 32]))
def test_parts_are_aligned_apart_and_inside_the_block(layers: list[LayerKV], block_size: int):
    spec = KVSpec(tuple(layers), block_size)
    end = payload = 0
    halves = [half for pair in spec.halves for half in pair]
    for part in sorted((part for half in halves for part in half.parts), key=lambda part: part.offset):
        assert part.offset >= end and part.offset % 2 == 0
        end = part.offset + part.nbytes
        payload += part.nbytes
    assert all(half.codes.offset % 64 == 0 for half in halves)
    assert end <= spec.block_bytes < end + PAGE and spec.block_bytes % PAGE == 0
    assert payload == spec.bytes_per_token * block_size


def test_known_answers():
    """Llama 3 70B in 16 bits keeps 327,680 bytes a token; SmolLM2-135M 23,040."""
    assert KVSpec((LayerKV(8, 128, KVFormat.BF16),) * 80, 16).bytes_per_token == 327_680
    smol = KVSpec((LayerKV(3, 64, KVFormat.BF16),) * 30, 16)
    assert (smol.bytes_per_token, smol.block_bytes) == (23_040, 368_640)


@pytest.mark.parametrize(
    ("form", "head_dim", "share"),
    [(KVFormat.INT8, 64, 0.516), (KVFormat.FP8_E4M3, 64, 0.516), (KVFormat.FP8_E5M2, 64, 0.5),
     (KVFormat.INT4, 64, 0.3125), (KVFormat.INT8, 128, 0.508), (KVFormat.INT4, 128, 0.3125)],
)  # fmt: skip
def test_scales_are_part_of_the_price(form: KVFormat, head_dim: int, share: float):
    """Not a half and a quarter of 16 bits."""
    spec, plain = (KVSpec((LayerKV(3, head_dim, each),) * 4, 16) for each in (form, KVFormat.BF16))
    assert spec.bytes_per_token / plain.bytes_per_token == pytest.approx(share, abs=5e-4)


def test_scales_that_are_fixed_beforehand_take_no_room():
    spec = KVSpec((LayerKV(3, 64, KVFormat.INT8, static=True),), 16)
    assert spec.bytes_per_token == 2 * 3 * 64 and spec.halves[0][0].scales is None


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (LayerKV(1, 48, KVFormat.INT4), "int4 needs a head_dim that 32 divides, got 48"),
        (LayerKV(1, 48, KVFormat.BF16, value_format=KVFormat.INT4), "int4 needs"),
        (LayerKV(1, 64, KVFormat.BF16, static=True), "no static scales"),
    ],
)
def test_formats_that_cannot_be(layer: LayerKV, words: str):
    with pytest.raises(ValueError, match=words):
        KVSpec((layer,), 16)


@pytest.mark.parametrize(("block_size", "head_dim"), [(0, 64), (15, 64), (16, 63)])
def test_what_cannot_be_paired_is_refused(block_size: int, head_dim: int):
    with pytest.raises(ValueError, match="even"):
        KVSpec((LayerKV(1, head_dim, KVFormat.FP32),), block_size)


# ---------------------------------------------------------------- groups
def layer(window: int | None, kv_heads: int = 1) -> LayerKV:
    return LayerKV(kv_heads, 64, KVFormat.BF16, window)


def test_layers_of_one_window_are_one_group():
    layers = (layer(64, 2), layer(None), layer(32), layer(64, 3), layer(None, 4))
    layout = KVLayout.of(layers, 16)
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (1, 4)), (32, (2,)), (64, (0, 3))]
    assert layout.groups[2].spec.layers == (layers[0], layers[3])
    assert layout.places == ((2, 0), (0, 0), (1, 0), (2, 1), (0, 1)) and layout.place(3) == (2, 1)
    assert layout.bytes_per_token == KVSpec(layers, 16).bytes_per_token
    assert layout.block_bytes == sum(group.spec.block_bytes for group in layout.groups)


def test_group_0_is_there_without_layers_too_and_has_no_bytes():
    layout = KVLayout.of((layer(64),) * 3, 16)
    assert [(group.window, group.layers) for group in layout.groups] == [(None, ()), (64, (0, 1, 2))]
    assert layout.groups[0].spec.block_bytes == layout.groups[0].spec.bytes_per_token == 0


@pytest.mark.parametrize(("max_model_len", "windowed"), [(None, True), (65, True), (64, False), (30, False)])
def test_a_window_that_no_sequence_fills_is_none(max_model_len: int | None, windowed: bool):
    layout = KVLayout.of((layer(64), layer(None)), 16, max_model_len)
    assert len(layout.groups) == 1 + windowed


def test_what_a_sequence_may_hold_at_once():
    pages = WindowPages.plan(512, 100, 16, step_tokens=64)
    assert pages.max_held == 36 + 2 and pages.usable_tokens(16) is None
    assert WindowPages.plan(512, 37, 16, step_tokens=64).usable_tokens(16) == 37 * 16
