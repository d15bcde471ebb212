"""The engine's heart: schedule, execute, update."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from engine.core.kv.events import Report
from engine.core.scheduler import Scheduler
from engine.core.stats import memory_stats
from engine.messages import AddRequest, CacheInfo, Stats, StepPlan, TokenOutput
from engine.ports import Executor, Grammar


class EngineCore:
    """Requests in, tokens out, a step at a time. No threads, no sockets: the same in the server, offline, in tests."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        grammar: Grammar,
        cache: CacheInfo,
        pipeline_depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pipeline_depth`: steps that may be unfinished at once. 1: no overlap; 2: results come a step late."""
        assert pipeline_depth >= 1, pipeline_depth
        self.scheduler = scheduler
        self._executor, self._grammar, self._cache = executor, grammar, cache
        self._depth, self._clock = pipeline_depth, clock
        self._unfinished: deque[tuple[StepPlan, Any]] = deque()

    def add(self, request: AddRequest) -> None:
        """Raises `InvalidRequest` or `ContextLengthExceeded`; the request is then not known."""
        self.scheduler.add(request)

    def abort(self, request_ids: list[str], reason: Literal["abort", "stop"] = "abort") -> None:
        """Ends sequences in any state, without an output. Unknown ids are ignored."""
        for request_id in request_ids:
            self.scheduler.abort(request_id, reason)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self._unfinished)

    def step(self) -> list[TokenOutput]:
        """Plans and starts a step, finishes the oldest one when as many as may be are under way.

        Rows that fail end their requests. An error of the executor ends everything: it is raised again when all pages
        are back and nothing of the broken step can be found in the cache.
        """
        start = self._clock()
        outputs = self.scheduler.expire(start)
        plan = self.scheduler.schedule(start)
        assert plan or self._unfinished or not self.scheduler.requests, "requests wait for nothing"
        self.scheduler.counters.schedule_seconds_total += self._clock() - start
        try:
            if plan is not None:
                self._unfinished.append((plan, self._execute(self._executor.forward, plan)))
            if self._unfinished and (plan is None or len(self._unfinished) == self._depth):
                outputs += self._finish_oldest()
        except Exception:
            self._unfinished.clear()
            self.scheduler.fail()
            raise
        return outputs

    def stats(self) -> Stats:
        """A snapshot of its own."""
        return self.scheduler.stats()

    def memory_stats(self) -> dict[str, int | float]:
        """total_pages, used_pages, cached_pages, free_pages, utilization, slot_utilization, active_requests,
        bytes_per_page, bytes_per_token, total_bytes."""
        return memory_stats(self.scheduler.kv, self._cache, len(self.scheduler.running))

    def events(self, limit: int, tenant: str | None = None) -> list[Report]:
        """The newest `limit` events, newest last; with a tenant, what that tenant may know."""
        return self.scheduler.kv.events.report(limit, tenant)

    def reset_prefix_cache(self) -> int:
        """Forgets all that is cached and not in use. Returns the number of pages."""
        return self.scheduler.kv.reset_cache()

    def check(self) -> None:
        """Asserts every invariant of scheduler and KV manager. O(pool)."""
        self.scheduler.check()

    def shutdown(self) -> None:
        """Safe to call twice."""
        self._executor.shutdown()

    def _finish_oldest(self) -> list[TokenOutput]:
        plan, handle = self._unfinished.popleft()
        masks = self._grammar.masks(plan)  # while the model runs
        result = self._execute(self._executor.sample, handle, masks)
        start = self._clock()
        outputs = self.scheduler.update(plan, result, start)
        self.scheduler.counters.update_seconds_total += self._clock() - start
        return outputs

    def _execute(self, call: Callable[..., Any], *arguments: Any) -> Any:
        start = self._clock()
        answer = call(*arguments)
        self.scheduler.counters.execute_seconds_total += self._clock() - start
        return answer
