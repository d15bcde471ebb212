"""How the pool gets its size, and the window that follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import SettingsError
from configs.kv import KVFormat, KVLayout, LayerKV
from configs.pool import (
    AUTO_BYTES,
    GRAPH_BYTES,
    MAX_GPU_PAGES,
    MAX_PAGES,
    STATES_BYTES,
    STEP,
    PoolPlan,
    resolve_num_blocks,
    step_bytes,
)
from configs.settings import Settings

GIB = 1024**3
SMOLLM2 = KVLayout.of((LayerKV(3, 64, KVFormat.BF16),) * 30, 16)
"""368,640 bytes a block."""


def plan(
    layout: KVLayout = SMOLLM2,
    model_len: int = 8192,
    available: int = 16 * GIB,
    weights: int = 269_000_000,
    **given: object,
) -> PoolPlan:
    settings = Settings(**given)
    window = min(model_len, settings.max_model_len or model_len)
    return resolve_num_blocks(settings, layout, window=window, available_bytes=available, weight_bytes=weights)


def refusal(**arguments: object) -> str:
    with pytest.raises(SettingsError) as caught:
        plan(**arguments)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


# ---------------------------------------------------------------- which setting decides
def test_override_before_bytes_before_utilization():
    both = {"kv_cache_memory_bytes": "1GiB", "gpu_memory_utilization": 0.5}
    assert plan(num_gpu_blocks_override=100, **both).num_blocks == 100
    assert plan(**both).num_blocks == GIB // SMOLLM2.block_bytes
    assert plan(gpu_memory_utilization=0.5).num_blocks == (8 * GIB - 269_000_000) // SMOLLM2.block_bytes


def test_default_is_capped_for_a_laptop():
    result = plan()
    assert result.num_blocks == AUTO_BYTES // SMOLLM2.block_bytes and "4 GiB" in result.decided_by
    assert result.pool_bytes <= AUTO_BYTES and result.num_tokens == result.num_blocks * 16
    assert result.max_model_len == 8192 and result.notes == ()


def test_default_takes_half_of_what_the_weights_leave():
    result = plan(available=3 * GIB, weights=GIB)
    assert result.num_blocks == GIB // SMOLLM2.block_bytes and "half" in result.decided_by


def test_default_takes_no_more_than_all_sequences_can_use():
    result = plan(max_num_seqs=2, max_model_len=1000)
    assert result.num_blocks == 2 * 63 and "--max-num-seqs 2" in result.decided_by
    assert plan(max_num_seqs=2, max_model_len=1000, gpu_memory_utilization=0.5).num_blocks > 126  # asked for: all of it


def test_utilization_has_no_cap():
    assert plan(gpu_memory_utilization=1.0).pool_bytes > AUTO_BYTES


# ---------------------------------------------------------------- the window
def test_window_is_the_smallest_of_three():
    assert plan(model_len=512).max_model_len == 512
    assert plan(max_model_len="1k").max_model_len == 1000
    assert plan(num_gpu_blocks_override=4).max_model_len == 64


def test_a04_window_lowered_to_the_pool_with_a_note():
    """The scenario's figures: 16 pages of 4 tokens under --max-model-len 4096."""
    layout = KVLayout.of((LayerKV(2, 16, KVFormat.FP32),) * 2, 4)
    result = plan(layout=layout, num_gpu_blocks_override=16, max_model_len=4096, block_size=4)
    assert result.max_model_len == 64
    [note] = result.notes
    assert "64 tokens" in note and "--max-model-len" in note and "4096" in note and "--num-gpu-blocks-override" in note


def test_window_of_the_model_lowered_too():
    [note] = plan(kv_cache_memory_bytes="1MiB").notes
    assert "the model" in note and "8192" in note and "--kv-cache-memory-bytes" in note
    [note] = plan(gpu_memory_utilization=0.005, weights=0).notes
    assert "--gpu-memory-utilization" in note


def test_exact_edges():
    assert plan(num_gpu_blocks_override=512).notes == ()  # 512 x 16 = 8192
    assert len(plan(num_gpu_blocks_override=511).notes) == 1
    size = SMOLLM2.block_bytes
    assert plan(kv_cache_memory_bytes=size).num_blocks == 1
    assert plan(available=size + 5, weights=5, num_gpu_blocks_override=1).num_blocks == 1


# ---------------------------------------------------------------- refusals name the flag
def test_not_even_one_page():
    message = refusal(kv_cache_memory_bytes=SMOLLM2.block_bytes - 1)
    assert "raise --kv-cache-memory-bytes" in message
    assert "raise --gpu-memory-utilization" in refusal(gpu_memory_utilization=0.01)
    assert "raise --kv-cache-memory-bytes" in refusal(available=400_000, weights=0)


def test_weights_too_large():
    message = refusal(available=GIB, weights=2 * GIB)
    assert "2 GiB" in message and "1 GiB" in message and "--model" in message


def test_more_than_there_is():
    assert "lower --kv-cache-memory-bytes" in refusal(kv_cache_memory_bytes="32GiB")
    assert "lower --num-gpu-blocks-override" in refusal(num_gpu_blocks_override=10**6)


@given(
    available=st.integers(0, 64 * GIB),
    weights=st.integers(0, 64 * GIB),
    override=st.none() | st.integers(1, 10**6),
    size=st.none() | st.integers(1, 64 * GIB),
    share=st.none() | st.floats(0.001, 1.0),
    window=st.integers(2, 10**6),
    seqs=st.integers(1, 512),
)
def test_a_plan_fits_or_is_refused(
    available: int, weights: int, override: int | None, size: int | None, share: float | None, window: int, seqs: int
):
    given = Settings(
        num_gpu_blocks_override=override, kv_cache_memory_bytes=size, gpu_memory_utilization=share, max_num_seqs=seqs
    )
    try:
        result = resolve_num_blocks(given, SMOLLM2, window=window, available_bytes=available, weight_bytes=weights)
    except SettingsError as error:
        assert "--" in str(error)
        return
    assert result.num_blocks >= 1
    assert weights + result.pool_bytes <= available
    assert result.max_model_len == min(window, result.num_tokens)
    assert bool(result.notes) == (result.max_model_len < window)
    if override is None and size is not None:
        assert result.pool_bytes <= size


# ---------------------------------------------------------------- on a GPU
def plan_on_gpu(available: int = 80 * GIB, weights: int = 16 * GIB, work: int = 2 * GIB, **given: object) -> PoolPlan:
    sizes = {"available_bytes": available, "weight_bytes": weights, "work": {STEP: work}}
    return resolve_num_blocks(Settings(**given), SMOLLM2, window=8192, is_gpu=True, **sizes)


def test_a_gpu_gives_nine_tenths_to_weights_step_and_pool() -> None:
    result = plan_on_gpu()
    assert result.num_blocks == (72 - 18) * GIB // SMOLLM2.block_bytes
    assert result.decided_by == "by default 0.9 of the GPU's free memory (54 GiB beside the weights and a step)"
    assert plan_on_gpu(gpu_memory_utilization=0.5).num_blocks == (40 - 18) * GIB // SMOLLM2.block_bytes
    assert plan_on_gpu(kv_cache_memory_bytes="3GiB").num_blocks == 3 * GIB // SMOLLM2.block_bytes


def test_what_a_step_takes_is_not_given_away_on_demand() -> None:
    assert plan_on_gpu(kv_cache_memory_bytes="62GiB").num_blocks == 62 * GIB // SMOLLM2.block_bytes
    with pytest.raises(SettingsError, match="asks for a KV cache of 63 GiB, but the weights and the 2 GiB of a step"):
        plan_on_gpu(kv_cache_memory_bytes="63GiB")
    with pytest.raises(SettingsError, match=r"take 80 GiB of the 80 GiB .* --max-num-batched-tokens"):
        plan_on_gpu(weights=78 * GIB)


def test_tiny_pages_do_not_fill_main_memory_with_books() -> None:
    """1,412 GiB hold four million pages of SmolLM2; asked for, they come."""
    result = plan_on_gpu(available=1412 * GIB)
    assert result.num_blocks == MAX_GPU_PAGES and f"{MAX_GPU_PAGES} pages" in result.decided_by
    assert plan_on_gpu(available=1412 * GIB, gpu_memory_utilization=0.9).num_blocks > MAX_GPU_PAGES
    toy = KVLayout.of((LayerKV(2, 16, KVFormat.FP32),) * 2, 4)
    result = resolve_num_blocks(Settings(), toy, window=2**31 - 1, available_bytes=64 * GIB, weight_bytes=2**20)
    assert result.num_blocks == MAX_PAGES and f"{MAX_PAGES} pages" in result.decided_by


def test_a_step_takes_more_with_each_thing_that_is_larger() -> None:
    def step(layout: KVLayout = SMOLLM2, window=8192, vocab_size=49152, num_parameters=134_515_008, **given) -> int:
        given = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "enforce_eager": True, **given}
        sizes = {"window": window, "vocab_size": vocab_size, "num_parameters": num_parameters}
        return step_bytes(Settings(**given), layout, **sizes).total

    plain = step()
    assert step(vocab_size=49153) - plain == 64 * 8, "each sequence has logits"
    assert step(window=8193) - plain == 2 * 3 * 64 * 12, "K and V of a whole context"
    assert step(max_num_batched_tokens=513) - plain == 64 * 2117, "a layer has 4.48 million numbers, 2117 squared"
    assert step(max_num_seqs=65) - plain == 49152 * 8
    wide = KVLayout.of((LayerKV(8, 128, KVFormat.BF16),) * 30, 16)
    assert step(layout=wide) - plain == 2 * 8192 * (1024 - 192) * 12
    assert 2**29 < plain < 2**30
    graphs = step(enforce_eager=False) - plain
    step_of_64 = 64 * (49152 * 8 + 64 * 2117) + STATES_BYTES
    assert graphs == step_of_64 + 11 * GRAPH_BYTES, "the largest step, and each of eleven"
