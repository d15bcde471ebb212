"""Numbers for people and dashboards. Gauges are read from their source, counters only grow."""

from collections import Counter
from dataclasses import dataclass, field

from engine.core.kv.manager import KVManager
from engine.messages import CacheInfo, Stats
from engine.request import Request


@dataclass(slots=True)
class Counters:
    """What the scheduler and the loop count; names and meanings as in `engine.messages.Stats`."""

    steps_total: int = 0
    scheduled_tokens: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    prefill_tokens_total: int = 0
    recomputed_tokens_total: int = 0
    generated_tokens_total: int = 0
    refreshes_total: int = 0
    refreshed_tokens_total: int = 0
    preemptions_total: Counter[str] = field(default_factory=Counter)
    schedule_seconds_total: float = 0.0
    execute_seconds_total: float = 0.0
    update_seconds_total: float = 0.0

    def count_chunk(self, request: Request, start: int, end: int) -> None:
        """The request's tokens [start, end), which are not what it generated last, by why they are computed."""
        again = max(0, min(end, request.num_reached) - start)
        self.recomputed_tokens_total += again
        if start < request.num_refreshed:
            self.refreshed_tokens_total += end - start - again
        else:
            self.prefill_tokens_total += max(0, min(end, request.num_prompt) - start - again)


def snapshot(counters: Counters, kv: KVManager, running: int, waiting: int, waiting_tokens: int) -> Stats:
    """A new object each time; O(1)."""
    pool = kv.pool
    return Stats(
        running=running,
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        pages_total=len(pool.blocks),
        pages_free=pool.num_free,
        pages_active=pool.num_active,
        pages_cached=pool.num_cached,
        pages_shared=pool.num_shared,
        tokens_stored=kv.tokens_stored,
        steps_total=counters.steps_total,
        scheduled_tokens=counters.scheduled_tokens,
        prefix_queries_total=counters.prefix_queries_total,
        prefix_hits_total=counters.prefix_hits_total,
        prefill_tokens_total=counters.prefill_tokens_total,
        recomputed_tokens_total=counters.recomputed_tokens_total,
        generated_tokens_total=counters.generated_tokens_total,
        refreshes_total=counters.refreshes_total,
        refreshed_tokens_total=counters.refreshed_tokens_total,
        preemptions_total=dict(counters.preemptions_total),
        evictions_total=dict(kv.evictions_total),
        copies_total=kv.copies_total,
        schedule_seconds_total=counters.schedule_seconds_total,
        execute_seconds_total=counters.execute_seconds_total,
        update_seconds_total=counters.update_seconds_total,
        window_usage=_window_usage(kv) if kv.windows else 0.0,
    )


def memory_stats(kv: KVManager, cache: CacheInfo, active_requests: int) -> dict[str, int | float]:
    """The pools at a glance. Pages are those that keep whole contexts.

    utilization: pages in use of all, in the KV group where that is most; slot_utilization: token slots filled of those
    in use, 1 when there are none; total_bytes: of all KV groups.
    """
    pool = kv.pool
    used = pool.num_active
    return {
        "total_pages": len(pool.blocks),
        "used_pages": used,
        "cached_pages": pool.num_cached,
        "free_pages": pool.num_free,
        "utilization": max(used / len(pool.blocks), _window_usage(kv)),
        "slot_utilization": kv.tokens_stored / (used * kv.block_size) if used else 1.0,
        "active_requests": active_requests,
        "bytes_per_page": cache.bytes_per_block,
        "bytes_per_token": cache.bytes_per_token,
        "total_bytes": cache.total_bytes,
    }


def _window_usage(kv: KVManager) -> float:
    return max((window.num_active / window.num_extents for window in kv.windows), default=0.0)
