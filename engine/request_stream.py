"""What one HTTP request reads: the deltas of its choices."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from engine.messages import AddRequest, RequestSummary, TextDelta, Timings
from engine.text.output_processor import OutputProcessor


@dataclass
class Sequence:
    """One choice: what the client knows of it."""

    request: AddRequest
    stream: "RequestStream"
    processor: OutputProcessor
    timings: Timings
    cached_tokens: int = 0
    num_preemptions: int = 0
    published: int = 0
    last_published: float = 0.0

    def summary(self, reason: Literal["stop", "length", "abort", "error"]) -> RequestSummary:
        """Of its whole life, which ends now if the engine has not said when it did."""
        if not self.timings.finished:
            self.timings.finished = time.monotonic()
        return RequestSummary(
            request_id=self.request.request_id,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            generated_tokens=self.published,
            max_tokens=self.request.params.max_tokens or 0,
            n=self.request.params.n,
            finish_reason=reason,
            num_preemptions=self.num_preemptions,
            timings=self.timings,
        )


class RequestStream:
    """Deltas of all choices of one request, in the order they come. Ends when every choice has finished."""

    def __init__(self, abort: Callable[[list[Sequence]], None], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._abort = abort
        self.open: dict[str, Sequence] = {}
        """Choices that have not finished; kept by the client."""
        self._pending: deque[TextDelta] = deque()
        self._latest: dict[int, TextDelta] = {}
        """Of each choice, its last delta if that is still pending."""
        self._pending_since = 0.0
        self._wake = asyncio.Event()
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        """Raises `RequestFailed`, `NotReady` or `EngineDead` once all earlier deltas have been read."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        self._pending_since = time.monotonic()
        delta = self._pending.popleft()
        if self._latest.get(delta.index) is delta:
            del self._latest[delta.index]
        return delta

    def abort(self) -> None:
        """Nobody reads any more: every choice still open ends now. Idempotent."""
        self._abort(list(self.open.values()))
        self.open.clear()
        self._wake.set()

    def deliver(self, delta: TextDelta) -> None:
        """Queues a delta; while the reader lags, deltas of one choice are merged, so that what waits stays bounded."""
        last = self._latest.get(delta.index)
        if last is not None:
            last.text += delta.text
            last.token_ids.extend(delta.token_ids)
            if delta.logprobs:
                last.logprobs = [*(last.logprobs or ()), *delta.logprobs]
            last.finish_reason, last.stop_reason = delta.finish_reason, delta.stop_reason
            last.timings, last.num_preemptions = delta.timings or last.timings, delta.num_preemptions
        else:
            if not self._pending:
                self._pending_since = time.monotonic()
            self._pending.append(delta)
            self._latest[delta.index] = delta
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.open.clear()
        self._wake.set()

    def is_stalled(self, limit: float) -> bool:
        return bool(self._pending) and time.monotonic() - self._pending_since > limit
