"""How bytes are shared out between whole contexts and windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import SettingsError
from configs.kv import KVFormat, KVLayout, LayerKV, WindowPages
from configs.pool import AUTO_BYTES, PoolPlan, resolve_num_blocks
from configs.settings import Settings

GIB, SIZE = 1024**3, 16


def layers(*windows: int | None) -> tuple[LayerKV, ...]:
    return tuple(LayerKV(1, 256, KVFormat.BF16, window) for window in windows)


GEMMA = KVLayout.of(layers(*([512] * 5 + [None]) * 4, 512, 512), SIZE)
"""Gemma 3 1B: 4 of 26 layers see everything, the others 512 tokens. 16 KiB a layer and page."""
MISTRAL = KVLayout.of((LayerKV(8, 128, KVFormat.BF16, 4096),) * 32, SIZE)
"""Mistral 7B: every layer sees 4096 tokens. 2 MiB a page."""


def plan(layout: KVLayout, window: int = 32768, available: int = 64 * GIB, weights: int = GIB, **given) -> PoolPlan:
    settings = Settings(**given)
    return resolve_num_blocks(settings, layout, window=window, available_bytes=available, weight_bytes=weights)


def enough(layout: KVLayout, number: int, seqs: int = 64, step: int = 512) -> int:
    window = layout.groups[number].window
    return 2 * (seqs * (-(-window // SIZE) + 2) + -(-step // SIZE))


def test_windows_get_enough_and_whole_contexts_the_rest():
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    assert (GEMMA.groups[0].spec.block_bytes, GEMMA.groups[1].spec.block_bytes) == (4 << 14, 22 << 14)
    result = plan(GEMMA, kv_cache_memory_bytes="8GiB", **given)
    extents = enough(GEMMA, 1)
    assert result.num_pages == ((8 * GIB - extents * (22 << 14)) // (4 << 14), extents)
    assert 8 * GIB - (4 << 14) < result.pool_bytes <= 8 * GIB
    assert result.windows == (WindowPages.plan(512, extents, SIZE, 512),)
    assert result.num_tokens == result.num_blocks * SIZE and result.full_sequences > 10


def test_a_small_cache_has_as_many_of_each():
    result = plan(GEMMA, kv_cache_memory_bytes="1GiB")
    assert result.num_pages == (GIB // (26 << 14),) * 2


def test_the_override_counts_pages_of_whole_contexts():
    assert plan(GEMMA, num_gpu_blocks_override=100).num_pages == (100, 100)
    assert plan(GEMMA, num_gpu_blocks_override=50_000, max_num_seqs=8).num_pages == (50_000, enough(GEMMA, 1, 8))


def test_where_every_layer_has_a_window_blocks_without_bytes_name_its_pages():
    result = plan(MISTRAL, kv_cache_memory_bytes="4GiB")
    names, extents = result.num_pages
    assert extents == 2048 and result.pool_bytes == 4 * GIB
    assert names == 8 * 2048  # eight windows fit: as many sequences of 32,768 tokens
    assert result.max_model_len == 32768 and not result.notes and 7 < result.full_sequences < 8


def test_without_any_flag_windows_cost_what_they_need():
    assert plan(MISTRAL, max_num_seqs=2).num_pages[1] <= enough(MISTRAL, 1, 2)
    result = plan(MISTRAL, max_num_seqs=2)
    assert result.pool_bytes <= AUTO_BYTES
    assert plan(GEMMA, window=1024, max_num_seqs=2).num_pages == (2 * 64, 2 * 64)


def test_several_windows():
    layout = KVLayout.of(layers(None, 64, 512), SIZE)
    result = plan(layout, kv_cache_memory_bytes="1GiB", max_num_seqs=4)
    assert result.num_pages[1:] == (enough(layout, 1, 4), enough(layout, 2, 4))
    assert GIB - (1 << 14) < result.pool_bytes <= GIB
    all_windowed = plan(KVLayout.of(layers(64, 512), SIZE), kv_cache_memory_bytes="1GiB", max_num_seqs=4)
    assert all_windowed.num_pages[1] == enough(layout, 1, 4) and all_windowed.num_pages[2] > 30_000


def test_a04_a_pool_smaller_than_a_window_and_a_step_bounds_the_context():
    result = plan(MISTRAL, kv_cache_memory_bytes="500MiB")
    assert result.num_pages[1] == 250 and result.max_model_len == 4000
    [note] = result.notes
    assert "4000 tokens" in note and "--kv-cache-memory-bytes or lower --max-num-batched-tokens" in note


def test_not_even_one_page_of_each():
    with pytest.raises(SettingsError, match="raise --kv-cache-memory-bytes"):
        plan(MISTRAL, kv_cache_memory_bytes="1MiB")


@given(
    windows=st.lists(st.sampled_from([None, 16, 100, 512, 4096]), min_size=1, max_size=6),
    override=st.none() | st.integers(1, 10**5),
    size=st.none() | st.integers(1, 32 * GIB),
    window=st.integers(2, 10**5),
    seqs=st.integers(1, 512),
)
def test_a_plan_fits_or_is_refused(
    windows: list[int | None], override: int | None, size: int | None, window: int, seqs: int
):
    layout = KVLayout.of(layers(*windows), SIZE, window)
    try:
        result = plan(layout, window, num_gpu_blocks_override=override, kv_cache_memory_bytes=size, max_num_seqs=seqs)
    except SettingsError as error:
        assert "--" in str(error)
        return
    bytes_of = [group.spec.block_bytes for group in layout.groups]
    assert result.pool_bytes == sum(n * b for n, b in zip(result.num_pages, bytes_of, strict=True)) <= 63 * GIB
    assert min(result.num_pages) >= 1 and max(result.num_pages[1:], default=0) <= result.num_blocks
    if override is None and size is not None:
        assert result.pool_bytes <= size
    assert 1 <= result.max_model_len <= min(window, result.num_blocks * SIZE)
    for pages in result.windows:
        assert pages.num_pages >= pages.max_held or result.max_model_len <= pages.num_pages * SIZE
    assert bool(result.notes) == (result.max_model_len < window)
