"""What the API process counts. Plain numbers in, a registry's families out (`exposition.py`).

Gauges and engine counters come from the engine's own snapshot, one a step; nothing here is incremented by a difference,
so nothing can drift or go backwards. Labels are bounded: model, reason, route template; never a key, user or request.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine import EngineReady, RequestSummary, Stats

FINISH_REASONS = ("stop", "length", "abort", "error")
REQUEST_ENDS = (*FINISH_REASONS, "rejected")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "queue_timeout", "loading", "draining", "dead")
PREEMPTION_REASONS = ("no_pages_left", "yielded_to_earlier")
EVICTION_REASONS = ("allocation", "duplicate", "window", "failed_step")
"""Counters by reason start at 0 for these: a series that began at 1 would hide its first event from rate()."""

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
HTTP_LATENCY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
COUNTERS = tuple(name for name in Stats.__struct_fields__ if name.endswith("_total") and name != "pages_total")
"""Fields of the snapshot that only ever grow."""
HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class Histogram:
    """Counts of values at or below each bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def token_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds: list[int] = []
    scale = 1
    while scale <= limit:
        bounds.extend(digit * scale for digit in (1, 2, 5) if digit * scale <= limit)
        scale *= 10
    return tuple(bounds)


@dataclass
class RequestHistograms:
    """Per-request distributions; those in tokens reach up to the model's window."""

    window: int
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    queue: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    inference: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    prefill: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    decode: Histogram = field(default_factory=lambda: Histogram(LATENCY))
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))
    preemptions: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    prompt_tokens: Histogram = field(init=False)
    generated_tokens: Histogram = field(init=False)
    longest_output: Histogram = field(init=False)
    max_tokens: Histogram = field(init=False)
    computed_prompt_tokens: Histogram = field(init=False)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "generated_tokens", "longest_output", "max_tokens", "computed_prompt_tokens"):
            setattr(self, name, Histogram(token_buckets(self.window)))

    def finished(self, summary: RequestSummary) -> None:
        """Marks that were not reached are 0 and count nowhere."""
        times = summary.timings
        self.end_to_end.observe(times.finished - times.arrival)
        if times.first_scheduled:
            self.queue.observe(times.first_scheduled - times.arrival)
            self.inference.observe(times.finished - times.first_scheduled)
        if times.first_token:
            self.prefill.observe(times.first_token - times.first_scheduled)
            self.decode.observe(times.finished - times.first_token)
            self.computed_prompt_tokens.observe(summary.prompt_tokens - summary.cached_tokens)
            if summary.generated_tokens > 1:
                self.per_output_token.observe((times.finished - times.first_token) / (summary.generated_tokens - 1))
        self.prompt_tokens.observe(summary.prompt_tokens)
        self.generated_tokens.observe(summary.generated_tokens)
        self.longest_output.observe(summary.generated_tokens)
        self.preemptions.observe(summary.num_preemptions)
        if summary.n == 1 or summary.request_id.endswith("-0"):  # choice 0 speaks for the request
            self.choices.observe(summary.n)
            self.max_tokens.observe(summary.max_tokens)


class Metrics:
    """Implements the engine's `Observer`; the HTTP layer reports the rest. One per app, one event loop."""

    def __init__(self) -> None:
        self.model_name = ""
        self.ready: EngineReady | None = None
        self.stats = Stats()
        self.requests = RequestHistograms(window=1)
        self.generated_tokens = 0
        self.sequences_finished: Counter[str] = Counter()
        self.requests_finished: Counter[str] = Counter()
        self.rejections: Counter[str] = Counter()
        self.disconnects = 0
        self.http_requests: Counter[tuple[str, str, str]] = Counter()
        self.http_seconds: dict[tuple[str, str], Histogram] = {}
        self.http_seconds_all = Histogram(HTTP_LATENCY)
        self._ended = Stats()
        """What engines that are gone had counted."""

    def engine_ready(self, model_name: str, ready: EngineReady) -> None:
        """From here on there is a model to label samples with. An engine started anew keeps the counts."""
        if self.ready is None:
            self.requests = RequestHistograms(ready.cache.max_model_len)
        self.model_name, self.ready = model_name, ready

    # ------------------------------------------------------------------ Observer
    def first_token(self, seconds: float) -> None:
        self.requests.first_token.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self.requests.inter_token.observe(seconds)

    def published(self, tokens: int) -> None:
        self.generated_tokens += tokens

    def finished(self, summary: RequestSummary) -> None:
        self.sequences_finished[summary.finish_reason] += 1
        self.requests.finished(summary)

    def rejected(self, reason: str) -> None:
        self.rejections[reason] += 1

    def step(self, stats: Stats) -> None:
        if stats.steps_total < self.stats.steps_total:
            self._ended = _joined(self._ended, self.stats)
        elif stats.steps_total > self.stats.steps_total:
            self.requests.step_tokens.observe(stats.scheduled_tokens)
        self.stats = stats

    # ------------------------------------------------------------------ HTTP
    def request_finished(self, reason: str) -> None:
        """Once for each request for tokens: one of `REQUEST_ENDS`."""
        self.requests_finished[reason] += 1

    def client_disconnected(self) -> None:
        self.disconnects += 1

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        method = method if method in HTTP_METHODS else "other"
        self.http_requests[handler, method, f"{(status or 499) // 100}xx"] += 1
        self.http_seconds.setdefault((handler, method), Histogram((0.1, 0.5, 1.0))).observe(seconds)
        self.http_seconds_all.observe(seconds)

    # ------------------------------------------------------------------ sums over engines
    def total(self, name: str) -> float:
        """A `*_total` number of the snapshot, over all engines there have been."""
        return float(getattr(self._ended, name)) + float(getattr(self.stats, name))

    def total_by_reason(self, name: str) -> dict[str, int]:
        return _merged(getattr(self._ended, name), getattr(self.stats, name))


def _joined(earlier: Stats, later: Stats) -> Stats:
    sums: dict[str, int | float | dict[str, int]] = {}
    for name in COUNTERS:
        old, new = getattr(earlier, name), getattr(later, name)
        sums[name] = _merged(old, new) if isinstance(new, dict) else old + new
    return msgspec.structs.replace(Stats(), **sums)


def _merged(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    return {reason: old.get(reason, 0) + new.get(reason, 0) for reason in sorted({*old, *new})}
