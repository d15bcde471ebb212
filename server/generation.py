"""All sequences of one HTTP request, read as one stream of deltas.

A request with several prompts has a stream for each; choice indices run on from prompt to prompt (prompt x n + i).
Here `usage` is counted, and here the request's end is counted once, whatever it is.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Self

from engine import EngineClient, Envelope, RequestStream, SamplingParams, TextDelta, TokenLogprobs, ending
from server.metrics import Metrics


@dataclass(frozen=True)
class Work:
    """What a request asks of the engine, translated and checked."""

    prompts: list[list[int]]
    params: SamplingParams
    envelope: Envelope
    """Its `request_id` is unique."""


@dataclass
class Usage:
    """Tokens of the request so far; each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    """Cached tokens by prompt, as its first choice found them."""

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


class Generation:
    """An iterator of `TextDelta` that may be cancelled while it waits, and must be closed."""

    def __init__(self, work: Work, streams: list[RequestStream], metrics: Metrics) -> None:
        self.work = work
        self.usage = Usage(sum(stream.prompt_tokens for stream in streams))
        self._streams = streams
        self._metrics = metrics
        self._reasons: set[str] = set()
        self._is_counted = False
        self._source: AsyncIterator[TextDelta] = streams[0] if len(streams) == 1 else _Merged(streams, work.params.n)

    @classmethod
    async def start(cls, client: EngineClient, work: Work, metrics: Metrics) -> Self:
        """Submits every prompt or none. Raises what `submit` raises."""
        return cls(work, await client.submit(work.prompts, work.params, work.envelope), metrics)

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        """Raises `RequestFailed` or `EngineDead` when one sequence fails: the others end with it."""
        try:
            delta = await anext(self._source)
        except StopAsyncIteration:
            self._count("length" if "length" in self._reasons else "stop")
            raise
        except Exception as error:
            self._count(ending(error))
            raise
        self.usage.completion_tokens += len(delta.token_ids)
        prompt, choice = divmod(delta.index, self.work.params.n)
        if choice == 0:
            self.usage.cached[prompt] = delta.cached_tokens
        if delta.finish_reason is not None:
            self._reasons.add(delta.finish_reason)
        return delta

    def close(self) -> None:
        """Ends what is still running, within a step. Idempotent."""
        for stream in self._streams:
            stream.abort()
        if isinstance(self._source, _Merged):
            self._source.close()
        self._count("abort")

    def _count(self, reason: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._metrics.request_finished(reason)


class _Merged:
    """Several streams read side by side. The queue is short, so that what waits is merged in the streams."""

    def __init__(self, streams: list[RequestStream], choices: int) -> None:
        self._queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(maxsize=8)
        self._running = len(streams)
        self._tasks = [
            asyncio.create_task(self._pump(stream, number * choices)) for number, stream in enumerate(streams)
        ]

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        while self._running:
            item = await self._queue.get()
            if isinstance(item, TextDelta):
                return item
            self._running -= 1
            if item is not None:
                raise item
        raise StopAsyncIteration

    async def _pump(self, stream: RequestStream, first_index: int) -> None:
        end: Exception | None = None
        try:
            async for delta in stream:
                delta.index += first_index
                await self._queue.put(delta)
        except Exception as error:
            end = error
        await self._queue.put(end)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


@dataclass
class Choice:
    """One finished choice of an answer that is not streamed."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def collect(generation: Generation, count: int) -> list[Choice]:
    """Every choice, whole. Raises what the iteration raises."""
    choices = [Choice(index) for index in range(count)]
    pieces: list[list[str]] = [[] for _ in range(count)]
    async for delta in generation:
        choice = choices[delta.index]
        pieces[delta.index].append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs or ())
        choice.prompt_logprobs = choice.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
    for choice, texts in zip(choices, pieces, strict=True):
        choice.text = "".join(texts)
    return choices
