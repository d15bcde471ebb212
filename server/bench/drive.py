"""The closed loop: a round of a workload against one server, and what it took."""

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from server.bench.endpoint import Answer, Endpoint, RequestError
from server.bench.workloads import Round, Turn

MIN_FOR_P95 = 20
"""Fewer values have no 95th percentile to speak of."""


@dataclass(frozen=True)
class Measured:
    """One round against one server. Times in seconds; None: nothing to measure, or the server does not say."""

    requests: int
    failed: int
    first_error: str | None
    short: int
    """Answers that ended before the tokens asked for."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Of the prompts, found in the server's prefix cache."""
    output_tokens: int | None
    """As the server counts, or chunks with text where it does not."""
    counts_chunks: bool
    total_s: float
    output_tokens_per_s: float | None
    ttft_s: float | None
    """Time to the first chunk with text: the median."""
    ttft_p95_s: float | None
    token_s: float | None
    """Time between tokens: the mean of each answer after its first token, and the median of those."""
    gap_p95_s: float | None
    """95 % of all gaps between chunks with text are shorter."""


@dataclass
class Load:
    """A round of a workload against one server, under way."""

    endpoint: Endpoint
    fields: dict[str, Any]
    """Of every request, beside the usual ones."""
    report: Callable[[], object] = lambda: None
    """Called after each request."""
    answers: list[tuple[Turn, Answer]] = field(default_factory=list)
    errors: list[RequestError] = field(default_factory=list)

    async def run(self, round_: Round, at_once: int) -> Measured:
        waiting = iter(round_)
        start = perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(self._client(waiting))
        return measured(self.answers, self.errors, perf_counter() - start)

    async def _client(self, waiting: Iterator[Sequence[Turn]]) -> None:
        """Takes one conversation after the other, as long as there are any."""
        for turns in waiting:
            try:
                await self._converse(turns)
            except RequestError as error:  # a conversation ends with its first failure
                self.errors.append(error)
                self.report()

    async def _converse(self, turns: Sequence[Turn]) -> None:
        messages: list[dict[str, str]] = []
        for turn in turns:
            fields = {**self.fields, "max_tokens": turn.output_tokens}
            if len(turns) == 1:
                answer = await self.endpoint.stream("/v1/completions", {**fields, "prompt": turn.prompt})
            else:
                messages.append({"role": "user", "content": turn.prompt})
                answer = await self.endpoint.stream("/v1/chat/completions", {**fields, "messages": messages})
                messages.append({"role": "assistant", "content": answer.text})
            self.answers.append((turn, answer))
            self.report()


def measured(answers: Sequence[tuple[Turn, Answer]], errors: Sequence[RequestError], total_s: float) -> Measured:
    counts = [len(answer.times) if answer.output_tokens is None else answer.output_tokens for _, answer in answers]
    firsts = [answer.times[0] for _, answer in answers]
    paces = [
        (answer.end - answer.times[0]) / (count - 1)
        for (_, answer), count in zip(answers, counts, strict=True)
        if count > 1
    ]
    gaps = [late - early for _, a in answers for early, late in zip(a.times, a.times[1:], strict=False)]
    prompts = [answer.prompt_tokens for _, answer in answers if answer.prompt_tokens is not None]
    cached = [answer.cached_tokens for _, answer in answers if answer.cached_tokens is not None]  # vLLM leaves out a 0
    return Measured(
        requests=len(answers) + len(errors),
        failed=len(errors),
        first_error=str(errors[0]) if errors else None,
        short=sum(count < turn.output_tokens for (turn, _), count in zip(answers, counts, strict=True)),
        prompt_tokens=sum(prompts) if prompts and len(prompts) == len(answers) else None,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(counts) if counts else None,
        counts_chunks=any(answer.output_tokens is None for _, answer in answers),
        total_s=total_s,
        output_tokens_per_s=sum(counts) / total_s if counts else None,
        ttft_s=median(firsts),
        ttft_p95_s=p95(firsts),
        token_s=median(paces),
        gap_p95_s=p95(gaps),
    )


def median(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def p95(values: Sequence[float]) -> float | None:
    if len(values) < MIN_FOR_P95:
        return None
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None], *, more_is_better: bool) -> list[float]:
    """By how much the first is ahead, round by round; 1: level. Rounds where one has no figure are left out."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    return [a / b if more_is_better else b / a for a, b in pairs]
