"""What sequences take of the KV cache: their numbers alone, in pages, and reserved in one piece each.

The reservation is the rival of paging: a server that needs a sequence's K and V to be contiguous must keep room for the
longest that it may become. It is given its due: layers with a window reserve no more than the window and a step.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from configs.errors import SettingsError
from configs.kv import KVGroup, KVLayout
from configs.pool import GPU_SHARE, Costs, Memory, PoolPlan, resolve_num_blocks
from configs.settings import Settings


def payload_bytes(layout: KVLayout, tokens: int) -> int:
    """K and V of one sequence, as far as its layers still need them."""
    return sum(group.spec.bytes_per_token * min(tokens, group.window or tokens) for group in layout.groups)


def paged_bytes(layout: KVLayout, tokens: int) -> int:
    """The pages of one sequence; see `PoolPlan.sequences`."""
    return sum(group.spec.block_bytes * _pages(group, tokens) for group in layout.groups)


def _pages(group: KVGroup, tokens: int) -> int:
    pages, size = -(-tokens // group.spec.block_size), group.spec.block_size
    return pages if group.window is None else min(pages, -(-group.window // size) + 2)


def reserved_bytes(layout: KVLayout, max_model_len: int, step_tokens: int) -> int:
    """Room for one sequence of `max_model_len` tokens, whatever it comes to. `step_tokens`: most in a step."""
    return sum(
        group.spec.bytes_per_token * min(max_model_len, (group.window or max_model_len) + step_tokens)
        for group in layout.groups
    )


def useful_share(layout: KVLayout, lengths: Sequence[int], held: int | None = None) -> float:
    """Of the bytes that sequences of these lengths hold, those with numbers in them. `held`: by each; None: pages."""
    useful = sum(payload_bytes(layout, tokens) for tokens in lengths)
    return useful / (sum(paged_bytes(layout, tokens) for tokens in lengths) if held is None else held * len(lengths))


def pool_for(settings: Settings, costs: Costs, count: int, tokens: int) -> int | None:
    """Bytes of the smallest pools that hold `count` sequences of `tokens` tokens, as the engine would share them out;
    None where no size does."""

    def is_enough(size: int) -> bool:
        pool = _pool_of(settings, costs, size)
        return pool is not None and pool.sequences(tokens) >= count

    step = -(-costs.step_tokens // settings.block_size)
    each = count * -(-tokens // settings.block_size) + step + 2
    low, high = 0, sum(group.spec.block_bytes for group in costs.layout.groups) * each
    if not is_enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def pages_for(settings: Settings, costs: Costs, pool_bytes: int) -> int:
    """What --num-gpu-blocks-override calls pools of this size."""
    pool = _pool_of(settings, costs, pool_bytes)
    assert pool is not None, pool_bytes
    return pool.num_pages[0 if costs.layout.groups[0].layers else -1]


def _pool_of(settings: Settings, costs: Costs, size: int) -> PoolPlan | None:
    given = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": size,
        "max_num_batched_tokens": costs.step_tokens,
    }
    sized = settings.model_copy(update=given)
    try:
        return resolve_num_blocks(
            sized, costs.layout, window=costs.window, available_bytes=size + costs.layout.block_bytes, weight_bytes=0
        )
    except SettingsError:
        return None


def memory_for(settings: Settings, costs: Costs, pool_bytes: int, memory: Memory) -> int:
    """Free memory from which weights, a step's work and pools of this size are a permitted share. `memory`: which
    kind."""
    taken = costs.weight_bytes + sum(costs.work(memory).values()) + pool_bytes
    share = settings.gpu_memory_utilization or (GPU_SHARE if memory.is_gpu else 1.0)
    if settings.num_gpu_blocks_override is not None or settings.kv_cache_memory_bytes is not None:
        share = 1.0  # they stand above it
    return math.ceil(taken / Fraction(share)) + 1  # a share of it is rounded down
