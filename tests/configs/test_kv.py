"""The layout of a block: every byte of every layer in a place of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.kv import PAGE, KVFormat, KVSpec, LayerKV

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
