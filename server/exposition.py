"""/metrics: the families a scrape gets. `docs/metrics.md` lists them all; a test compares the two.

The set under `vllm:` is compatibility, not identity: names, labels and buckets are those that public dashboards,
autoscalers and gateways ask for. What is Octavo's own starts with `octavo_`.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from configs.version import VERSION
from server.metrics import (
    EVICTION_REASONS,
    FINISH_REASONS,
    PREEMPTION_REASONS,
    REJECTIONS,
    REQUEST_ENDS,
    Histogram,
    Metrics,
)

PHASES = ("loading", "ready", "draining", "dead")
ENGINE = "0"
NAMES = ("model_name", "engine")

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value)


def _labelled(kind: Family, name: str, about: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    family: GaugeMetricFamily | CounterMetricFamily = kind(name, about, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _by_reason(name: str, about: str, known: Sequence[str], counts: Mapping[str, float]) -> Metric:
    every = {**dict.fromkeys(known, 0), **counts}
    return _labelled(CounterMetricFamily, name, about, ("reason",), (((key,), n) for key, n in every.items()))


def _add_histogram(family: HistogramMetricFamily, labels: tuple[str, ...], histogram: Histogram) -> None:
    cumulative, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        cumulative += count
        buckets.append((str(floatToGoString(bound)), cumulative))  # type: ignore[no-untyped-call]
    family.add_metric(labels, buckets, histogram.sum)


class OctavoCollector(Collector):
    """Octavo's own metrics: where every page is, and why it went there."""

    def __init__(self, metrics: Metrics, phase: Callable[[], str]) -> None:
        self._metrics, self._phase = metrics, phase

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._process()
        yield from self._http()
        yield from self._pages()
        yield from self._work()

    def _process(self) -> Iterator[Metric]:
        build = {"version": VERSION, "python": platform.python_version()}
        yield _labelled(
            GaugeMetricFamily, "octavo_build_info", "Always 1.", tuple(build), [(tuple(build.values()), 1.0)]
        )
        now = self._phase()
        phases = [((phase,), float(phase == now)) for phase in PHASES]
        yield _labelled(
            GaugeMetricFamily, "octavo_engine_phase", "1 for the phase the engine is in.", ("phase",), phases
        )

    def _http(self) -> Iterator[Metric]:
        m = self._metrics
        yield _by_reason(
            "octavo_requests_finished",
            "Requests for tokens by how they ended, each counted once.",
            REQUEST_ENDS,
            m.requests_finished,
        )
        yield _by_reason(
            "octavo_requests_rejected", "Requests refused at the door, by reason.", REJECTIONS, m.rejections
        )
        yield _counter("octavo_client_disconnects", "Requests whose client went away first.", m.disconnects)
        yield _labelled(
            CounterMetricFamily,
            "http_requests",
            "HTTP requests by route template, method and class of status; probes and scrapes excluded.",
            ("handler", "method", "status"),
            list(m.http_requests.items()),
        )
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From the request's head to the response's end.",
            labels=("handler", "method"),
        )
        for labels, histogram in list(m.http_seconds.items()):
            _add_histogram(seconds, labels, histogram)
        yield seconds
        every = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "The same, all routes together, in finer buckets.", labels=()
        )
        _add_histogram(every, (), m.http_seconds_all)
        yield every

    def _pages(self) -> Iterator[Metric]:
        m, stats = self._metrics, self._metrics.stats
        cache = m.ready.cache if m.ready else None
        states = [(("free",), stats.pages_free), (("active",), stats.pages_active), (("cached",), stats.pages_cached)]
        yield _labelled(
            GaugeMetricFamily,
            "octavo_kv_pages",
            "Pages by state, adding up to the pool: free, active (in a sequence), cached (kept for reuse, evictable).",
            ("state",),
            states,
        )
        yield _gauge("octavo_kv_pages_shared", "Active pages that two or more sequences read.", stats.pages_shared)
        yield _gauge("octavo_kv_pool_pages", "Pages of the pool.", stats.pages_total)
        yield _gauge("octavo_kv_page_bytes", "Bytes of one page, all layers.", cache.bytes_per_block if cache else 0)
        yield _gauge("octavo_kv_tokens_stored", "Token slots filled in active pages.", stats.tokens_stored)
        slots = stats.pages_active * (cache.block_size if cache else 0)
        yield _gauge(
            "octavo_kv_slot_utilization",
            "Token slots filled, of those in active pages: 1 minus the waste inside last pages. 1 when there are none.",
            stats.tokens_stored / slots if slots else 1.0,
        )
        yield _counter("octavo_kv_page_copies", "Pages copied on write.", m.total("copies_total"))
        evictions = m.total_by_reason("evictions_total")
        yield _by_reason("octavo_kv_evictions", "Cached pages given up, by reason.", EVICTION_REASONS, evictions)
        yield _counter(
            "octavo_prefill_tokens_saved", "Prompt tokens taken from the cache.", m.total("prefix_hits_total")
        )
        yield _counter(
            "octavo_prefill_tokens_looked_up", "Prompt tokens looked up in the cache.", m.total("prefix_queries_total")
        )

    def _work(self) -> Iterator[Metric]:
        m, stats = self._metrics, self._metrics.stats
        yield _gauge("octavo_sequences_running", "Sequences in the running set.", stats.running)
        yield _gauge("octavo_sequences_waiting", "Sequences waiting for a place.", stats.waiting)
        yield _gauge(
            "octavo_prompt_tokens_waiting", "Prompt tokens of waiting sequences to compute.", stats.waiting_tokens
        )
        yield _counter(
            "octavo_prefill_tokens_computed",
            "Prompt tokens computed, recomputation after preemption excluded.",
            m.total("prefill_tokens_total"),
        )
        yield _counter(
            "octavo_recomputed_tokens", "Tokens computed again after a preemption.", m.total("recomputed_tokens_total")
        )
        yield _counter(
            "octavo_kv_refreshes",
            "Times that a sequence's keys and values were set to be computed anew in full precision.",
            m.total("refreshes_total"),
        )
        yield _counter(
            "octavo_kv_refreshed_tokens",
            "Tokens computed in full precision for refreshes.",
            m.total("refreshed_tokens_total"),
        )
        yield _counter("octavo_generated_tokens", "Generated tokens handed to readers.", m.generated_tokens)
        preemptions = m.total_by_reason("preemptions_total")
        yield _by_reason("octavo_preemptions", "Sequences preempted, by reason.", PREEMPTION_REASONS, preemptions)
        yield _counter("octavo_steps", "Engine steps.", m.total("steps_total"))
        yield _gauge("octavo_step_tokens", "Tokens in the latest step.", stats.scheduled_tokens)
        parts = [((part,), m.total(f"{part}_seconds_total")) for part in ("schedule", "execute", "update")]
        yield _labelled(
            CounterMetricFamily, "octavo_step_seconds", "Time in the engine's steps, by part.", ("part",), parts
        )


class CompatCollector(Collector):
    """The names that dashboards, autoscalers and gateways built for vLLM ask for. Those with `gpu_` are what vLLM once
    called the same numbers."""

    def __init__(self, metrics: Metrics, gpu_memory_utilization: float | None) -> None:
        self._metrics = metrics
        self._memory_share = gpu_memory_utilization

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self._metrics.ready is not None:
            yield from self._gauges()
            yield from self._counters()
            yield from self._histograms()

    def _one(self, kind: Family, name: str, about: str, value: float) -> Metric:
        return _labelled(kind, f"vllm:{name}", about, NAMES, [((self._metrics.model_name, ENGINE), value)])

    def _several(self, kind: Family, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
        samples = [((self._metrics.model_name, ENGINE, key), value) for key, value in values.items()]
        return _labelled(kind, f"vllm:{name}", about, (*NAMES, label), samples)

    def _gauges(self) -> Iterator[Metric]:
        stats, gauge = self._metrics.stats, GaugeMetricFamily
        yield self._one(gauge, "num_requests_running", "Sequences in the running set.", stats.running)
        yield self._one(gauge, "num_requests_waiting", "Sequences waiting.", stats.waiting)
        waiting = {"capacity": stats.waiting, "deferred": 0}
        yield self._several(gauge, "num_requests_waiting_by_reason", "Sequences waiting, by reason.", "reason", waiting)
        used = max(stats.pages_active / stats.pages_total if stats.pages_total else 0.0, stats.window_usage)
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
            yield self._one(gauge, name, "Share of the pages in use, 0 to 1; cached pages are free.", used)
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        assert self._metrics.ready is not None
        cache = self._metrics.ready.cache
        labels = {
            "block_size": cache.block_size,
            "num_gpu_blocks": cache.num_blocks,
            "num_cpu_blocks": 0,
            "cache_dtype": cache.dtype,
            "kv_cache_bytes_per_token": cache.bytes_per_token,
            "kv_cache_plain_bytes_per_token": cache.plain_bytes_per_token or cache.bytes_per_token,
            "gpu_memory_utilization": self._memory_share,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "kv_cache_size_tokens": cache.num_tokens,
            "kv_cache_max_concurrency": round(cache.num_tokens / cache.max_model_len, 2),
            "engine": ENGINE,
        }
        values = tuple(str(value) for value in labels.values())
        about = "The KV pool, as labels. Always 1."
        return _labelled(GaugeMetricFamily, "vllm:cache_config_info", about, tuple(labels), [(values, 1.0)])

    def _counters(self) -> Iterator[Metric]:
        m, counter = self._metrics, CounterMetricFamily
        hits, computed = m.total("prefix_hits_total"), m.total("prefill_tokens_total")
        for age in ("", "gpu_"):
            queries = m.total("prefix_queries_total")
            yield self._one(counter, f"{age}prefix_cache_queries", "Prompt tokens looked up.", queries)
            yield self._one(counter, f"{age}prefix_cache_hits", "Prompt tokens found in the cache.", hits)
        preemptions = sum(m.total_by_reason("preemptions_total").values())
        yield self._one(counter, "num_preemptions", "Sequences preempted.", preemptions)
        yield self._one(counter, "prompt_tokens", "Prompt tokens processed, cached ones included.", hits + computed)
        yield self._one(counter, "prompt_tokens_cached", "Prompt tokens taken from the cache.", hits)
        sources = {"local_compute": computed, "local_cache_hit": hits, "external_kv_transfer": 0}
        yield self._several(counter, "prompt_tokens_by_source", "Prompt tokens by source.", "source", sources)
        yield self._one(counter, "generation_tokens", "Generated tokens handed to readers.", m.generated_tokens)
        ends = {reason: m.sequences_finished[reason] for reason in FINISH_REASONS}
        yield self._several(counter, "request_success", "Sequences finished, by reason.", "finished_reason", ends)
        full = [(self._metrics.model_name, reason) for reason in ("max_num_queued_reqs", "max_num_queued_tokens")]
        yield _labelled(
            counter,
            "vllm:admission_rejections",
            "Requests refused because the queue was full.",
            ("model_name", "reason"),
            [(labels, m.rejections[labels[1]]) for labels in full],
        )

    def _histograms(self) -> Iterator[Metric]:
        r = self._metrics.requests
        for name, about, histogram in (
            ("request_prompt_tokens", "Prompt tokens of finished sequences.", r.prompt_tokens),
            ("request_generation_tokens", "Generated tokens of finished sequences.", r.generated_tokens),
            ("request_max_num_generation_tokens", "Generated tokens of each choice.", r.longest_output),
            ("request_params_n", "Choices asked for.", r.choices),
            ("request_params_max_tokens", "max_tokens asked for, clamped to the window.", r.max_tokens),
            ("iteration_tokens_total", "Tokens in one engine step.", r.step_tokens),
            ("time_to_first_token_seconds", "From arrival to the first token.", r.first_token),
            ("inter_token_latency_seconds", "Between two deliveries of one sequence.", r.inter_token),
            ("request_time_per_output_token_seconds", "Mean time per token after the first.", r.per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", r.end_to_end),
            ("request_queue_time_seconds", "Waiting for the first step.", r.queue),
            ("request_inference_time_seconds", "From the first step to the end.", r.inference),
            ("request_prefill_time_seconds", "From the first step to the first token.", r.prefill),
            ("request_decode_time_seconds", "From the first token to the end.", r.decode),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens computed, cached excluded.",
                r.computed_prompt_tokens,
            ),
            ("request_num_preemptions", "Preemptions a sequence went through.", r.preemptions),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", about, labels=NAMES)
            _add_histogram(family, (self._metrics.model_name, ENGINE), histogram)
            yield family


def build_registry(
    metrics: Metrics, phase: Callable[[], str], compat: bool, gpu_memory_utilization: float | None
) -> CollectorRegistry:
    """One registry an app: nothing is registered globally."""
    registry = CollectorRegistry(auto_describe=False)
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)
    registry.register(OctavoCollector(metrics, phase))
    if compat:
        registry.register(CompatCollector(metrics, gpu_memory_utilization))
    return registry


def render(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """(body, content type) in the format the scraper asked for.

    Our names are legal in every format and are never escaped: the client library's way of escaping would make a colon
    an underscore for a scraper that does not ask for UTF-8, as Prometheus 2 does not.
    """
    encoder, content_type = choose_encoder(accept or "")
    return cast(Callable[..., bytes], encoder)(registry, escaping=ALLOWUTF8), content_type
