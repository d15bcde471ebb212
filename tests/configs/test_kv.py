"""The layout of a block: every byte of every layer in a place of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.kv import PAGE, KVFormat, KVLayout, KVSpec, LayerKV, WindowPages

layers = st.builds(
    LayerKV, st.integers(1, 12), st.sampled_from([4, 6, 30, 64, 90, 96, 128, 256]), st.sampled_from(KVFormat)
)


@given(st.lists(layers, min_size=1, max_size=30), st.sampled_from([2, 4, 6, 8, 16, 32]))
def test_parts_are_aligned_apart_and_inside_the_block(layers: list[LayerKV], block_size: int):
    spec = KVSpec(tuple(layers), block_size)
    end = payload = 0
    for part in (part for pair in spec.parts for part in pair):
        assert part.offset % 64 == 0 and part.offset >= end
        end = part.offset + part.nbytes
        payload += part.nbytes
    assert end <= spec.block_bytes < end + PAGE and spec.block_bytes % PAGE == 0
    assert payload == spec.bytes_per_token * block_size


def test_known_answers():
    """Llama 3 70B in 16 bits keeps 327,680 bytes a token; SmolLM2-135M 23,040."""
    assert KVSpec((LayerKV(8, 128, KVFormat.BF16),) * 80, 16).bytes_per_token == 327_680
    smol = KVSpec((LayerKV(3, 64, KVFormat.BF16),) * 30, 16)
    assert (smol.bytes_per_token, smol.block_bytes) == (23_040, 368_640)


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
