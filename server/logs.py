"""What operators read: a line for each HTTP request, and the engine's throughput every ten seconds while it works.

Never in a line: text of prompts and answers, keys, and what was computed from keys.
"""

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from engine import Observer, RequestSummary, Stats

access = logging.getLogger("octavo.access")
throughput = logging.getLogger("octavo.throughput")

PERIOD_SECONDS = 10.0
MAX_REMEMBERED = 4096
"""Ended requests whose line has not been written yet: one that never will be must not stay for ever."""
GONE = 499
"""The status of a request whose client went away before there was one, or stopped reading; nobody is sent it."""


@dataclass
class RequestRecord:
    """All sequences of one HTTP request: prompts, and choices of each."""

    prompts: dict[str, RequestSummary] = field(default_factory=dict)
    """One choice of each prompt."""
    cached: dict[str, int] = field(default_factory=dict)
    """Of each prompt, as its first choice found it: the others find that one's pages too."""
    reasons: set[str] = field(default_factory=set)
    sequences: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    """The earliest of all sequences, 0.0 where none got so far."""

    def add(self, summary: RequestSummary) -> None:
        prompt = summary.request_id.rpartition("-")[0] if summary.n > 1 else summary.request_id
        self.prompts[prompt] = summary
        self.cached[prompt] = min(self.cached.get(prompt, summary.cached_tokens), summary.cached_tokens)
        self.reasons.add(summary.finish_reason)
        self.sequences += 1
        self.generated_tokens += summary.generated_tokens
        self.preemptions += summary.num_preemptions
        self.first_scheduled = _earlier(self.first_scheduled, summary.timings.first_scheduled)
        self.first_token = _earlier(self.first_token, summary.timings.first_token)

    def fields(self) -> dict[str, Any]:
        """Seconds are rounded to tenths of a millisecond."""
        summaries = list(self.prompts.values())
        arrival = min(summary.timings.arrival for summary in summaries)
        marks = {"queue_seconds": self.first_scheduled, "first_token_seconds": self.first_token}
        return {
            "sequences": self.sequences,
            "prompt_tokens": sum(summary.prompt_tokens for summary in summaries),
            "cached_tokens": sum(self.cached.values()),
            "generated_tokens": self.generated_tokens,
            **{name: round(mark - arrival, 4) for name, mark in marks.items() if mark},
            "finish_reason": "+".join(sorted(self.reasons)),
            "preemptions": self.preemptions,
        }


def _earlier(one: float, other: float) -> float:
    """0.0: not reached."""
    return min(one, other) if one and other else one or other


class RequestLog:
    """An `Observer` in front of another one. It keeps what ended until the HTTP layer writes the request's line."""

    def __init__(self, observer: Observer) -> None:
        self._next = observer
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        self.throughput = ThroughputLine()

    # ------------------------------------------------------------------ Observer
    def first_token(self, seconds: float) -> None:
        self._next.first_token(seconds)

    def inter_token(self, seconds: float) -> None:
        self._next.inter_token(seconds)

    def published(self, tokens: int) -> None:
        self._next.published(tokens)

    def rejected(self, reason: str) -> None:
        self._next.rejected(reason)

    def finished(self, summary: RequestSummary) -> None:
        self._next.finished(summary)
        self._ended.setdefault(request_of(summary), RequestRecord()).add(summary)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def step(self, stats: Stats) -> None:
        self._next.step(stats)
        self.throughput.step(stats)

    # ------------------------------------------------------------------ HTTP
    def write(self, request: dict[str, Any], engine_id: str | None) -> None:
        """The line of an answered request. `request`: id, method, path, route, status (0: the client had gone) and
        seconds; `engine_id`: the id that the engine knows it by, if it does."""
        record = self._ended.pop(engine_id, None) if engine_id else None
        fields = {**request, "status": request["status"] or GONE, "seconds": round(request["seconds"], 4)}
        if engine_id:
            fields["engine_id"] = engine_id
        words = f"{fields['method']} {fields['path']!r} {fields['status']} {fields['seconds']:.3f}s id={fields['id']}"
        if record is not None:
            fields |= record.fields()
            words += " " + _words(fields)
        access.info("%s", words, extra={"fields": fields})


def request_of(summary: RequestSummary) -> str:
    """The id that all sequences of an HTTP request share: 'ID~12345678', 'ID~12345678.PROMPT-CHOICE' → 'ID~12345678'"""
    head, tilde, tail = summary.request_id.rpartition("~")
    return head + tilde + tail.partition("-")[0].partition(".")[0]


def _words(fields: dict[str, Any]) -> str:
    waited = fields.get("queue_seconds")
    first = fields.get("first_token_seconds")
    return (
        f"prompt={fields['prompt_tokens']} cached={fields['cached_tokens']} generated={fields['generated_tokens']} "
        f"queue={'-' if waited is None else f'{waited:.3f}s'} first_token={'-' if first is None else f'{first:.3f}s'} "
        f"finish={fields['finish_reason']} preemptions={fields['preemptions']}"
    )


class ThroughputLine:
    """A line every `PERIOD_SECONDS` in which the engine stepped or has work left. Idle, it sets no timer."""

    def __init__(self) -> None:
        self.period = PERIOD_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._written = Stats()
        self._latest = Stats()
        self._since = 0.0

    def step(self, stats: Stats) -> None:
        if stats.steps_total < self._latest.steps_total:  # an engine started anew counts from nothing
            self._written = Stats()
        self._latest = stats
        if self._timer is None and stats.steps_total > self._written.steps_total:
            self._start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(self.period, self._write)

    def _write(self) -> None:
        seconds = asyncio.get_running_loop().time() - self._since
        fields = throughput_fields(self._written, self._latest, seconds)
        throughput.info("%s", throughput_words(fields), extra={"fields": fields})
        self._written, self._timer = self._latest, None
        if self._latest.running or self._latest.waiting:
            self._start()


def throughput_fields(before: Stats, now: Stats, seconds: float) -> dict[str, Any]:
    """What happened between two snapshots, and the gauges of the later one."""
    looked_up = now.prefix_queries_total - before.prefix_queries_total
    found = now.prefix_hits_total - before.prefix_hits_total
    return {
        "prompt_tokens_per_second": round((now.prefill_tokens_total - before.prefill_tokens_total) / seconds, 1),
        "output_tokens_per_second": round((now.generated_tokens_total - before.generated_tokens_total) / seconds, 1),
        "running": now.running,
        "waiting": now.waiting,
        "kv_usage": round(now.pages_active / now.pages_total, 4) if now.pages_total else 0.0,
        "hit_rate": round(found / looked_up, 4) if looked_up else None,
        "preemptions": sum(now.preemptions_total.values()) - sum(before.preemptions_total.values()),
    }


def throughput_words(fields: dict[str, Any]) -> str:
    hits = fields["hit_rate"]
    return (
        f"prompt {fields['prompt_tokens_per_second']} tok/s, output {fields['output_tokens_per_second']} tok/s, "
        f"running {fields['running']}, waiting {fields['waiting']}, KV usage {fields['kv_usage']:.1%}, "
        f"prefix hits {'-' if hits is None else f'{hits:.1%}'}, preemptions {fields['preemptions']}"
    )
