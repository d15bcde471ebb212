"""The scratch of refreshes, in numbers."""

from dataclasses import replace

import pytest

from configs.kv import KVFormat, KVLayout, LayerKV
from configs.refresh import scratch, scratch_bytes

INT8 = LayerKV(8, 128, KVFormat.INT8)
LLAMA_8B = KVLayout.of((INT8,) * 32, 16)


@pytest.mark.parametrize(("plain", "size"), [(KVFormat.BF16, 2), (KVFormat.FP16, 2), (KVFormat.FP32, 4)])
def test_one_sequence_in_the_models_own_format(plain: KVFormat, size: int):
    """Of Llama 3 8B 131,072 bytes a token in 16 bits: 1 GiB for 8,192 tokens."""
    assert scratch_bytes(LLAMA_8B, plain, 8192) == 8192 * 2 * 32 * 8 * 128 * size == 2**29 * size
    assert scratch_bytes(LLAMA_8B, plain, 8177) == scratch_bytes(LLAMA_8B, plain, 8192), "whole blocks"
    assert scratch_bytes(LLAMA_8B, plain, 8176) < scratch_bytes(LLAMA_8B, plain, 8192)


@pytest.mark.parametrize(
    "layer",
    [
        INT8,
        replace(INT8, static=True),
        LayerKV(8, 128, KVFormat.BF16, value_format=KVFormat.INT4),
        LayerKV(8, 128, KVFormat.FP8_E5M2, value_format=KVFormat.FP16),
    ],
)
def test_k_and_v_are_kept_whole_where_either_is_quantised(layer: LayerKV):
    group = scratch(KVLayout.of((layer, layer), 16), KVFormat.BF16)
    assert group.layers == (0, 1) and group.spec.layers == (LayerKV(8, 128, KVFormat.BF16),) * 2


def test_layers_that_are_not_quantised_take_no_room():
    plain, wide = LayerKV(8, 128, KVFormat.BF16), LayerKV(8, 128, KVFormat.FP32)
    sliding = LayerKV(4, 64, KVFormat.FP8_E4M3, window=64)
    group = scratch(KVLayout.of((plain, INT8, sliding, wide, INT8), 16), KVFormat.BF16)
    assert group.layers == (1, 2, 4)
    assert [layer.kv_heads for layer in group.spec.layers] == [8, 4, 8]
    assert all(layer.formats == (KVFormat.BF16, KVFormat.BF16) for layer in group.spec.layers)
    assert scratch_bytes(KVLayout.of((plain, wide), 16), KVFormat.BF16, 8192) == 0
