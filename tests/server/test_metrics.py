"""What is counted, and that docs/metrics.md tells the truth about it."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import CacheInfo, EngineReady, RequestSummary, Stats, Timings
from server.exposition import CompatCollector, OctavoCollector, build_registry, render
from server.metrics import FIRST_TOKEN, LATENCY, Histogram, Metrics, token_buckets

DOC = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
READY = EngineReady(CacheInfo(64, 16, 4096, 256, "bf16", 512, True), {"model": "tiny"}, 259)


def summary(**changes) -> RequestSummary:
    values = {
        "request_id": "r",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "generated_tokens": 5,
        "max_tokens": 20,
        "n": 1,
        "finish_reason": "stop",
        "num_preemptions": 0,
        "timings": Timings(arrival=10.0, first_scheduled=11.0, first_token=13.0, finished=17.0),
    }
    return RequestSummary(**{**values, **changes})


def samples(metrics: Metrics, compat: bool = True) -> dict[tuple[str, ...], float]:
    """(name, label=value, …) -> value, through the real text format and the official parser."""
    registry = build_registry(metrics, lambda: "ready", compat, None)
    body, _ = render(registry, None)
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.engine_ready("tiny", READY)
    return metrics


VLLM = ("engine=0", "model_name=tiny")


# ---------------------------------------------------------------------- documentation
def exported() -> set[tuple[str, str, tuple[str, ...]]]:
    metrics = Metrics()
    metrics.engine_ready("tiny", READY)
    metrics.step(Stats(steps_total=1, evictions_total={"allocation": 1}, preemptions_total={"out_of_pages": 1}))
    metrics.rejected("draining")
    metrics.http_request("/v1/models", "GET", 200, 0.1)
    found = set()
    for collector in (OctavoCollector(metrics, lambda: "ready"), CompatCollector(metrics, None)):
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {key for sample in family.samples for key in sample.labels if key != "le"}
            found.add((name, family.type, tuple(sorted(labels))))
    return found


def test_documentation_lists_exactly_what_is_exported():
    rows = re.findall(r"^\| `([a-z_:0-9]+)` \| (\w+) \| ([^|]*) \|", DOC.read_text(), re.MULTILINE)
    documented = {
        (name, kind, tuple(sorted(label.strip() for label in labels.split(",") if label.strip() != "–")))
        for name, kind, labels in rows
    }
    assert documented == exported()


def test_the_compatible_must_have_set_is_complete():
    names = {name for name, _, _ in exported()}
    must = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
        prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
        request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n
        request_params_max_tokens iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
        request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
        request_prefill_kv_computed_tokens cache_config_info num_requests_waiting_by_reason prompt_tokens_cached_total
        prompt_tokens_by_source_total request_num_preemptions admission_rejections_total"""
    assert {f"vllm:{name}" for name in must.split()} <= names


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "*/*",
        "text/plain;version=0.0.4",
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",  # Prometheus 2
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;q=0.3",  # Prometheus 3
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,text/plain;version=0.0.4",
        "text/plain;version=1.0.0;escaping=underscores",
    ],
)
def test_names_reach_every_scraper_as_they_are(metrics: Metrics, accept: str | None):
    body, _ = render(build_registry(metrics, lambda: "ready", True, None), accept)
    lines = body.decode().splitlines()
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_preemptions_total", "vllm:iteration_tokens_total_count"):
        assert any(line.startswith(name + "{") for line in lines), name
    assert not any("vllm_" in line for line in lines)


def test_a29_the_caches_format_and_what_it_saves_are_labels():
    for cache, words in (
        (READY.cache, ("bf16", "256", "256")),
        (CacheInfo(64, 16, 4096, 132, "int8/int4", 512, True, None, 256), ("int8/int4", "132", "256")),
    ):
        metrics = Metrics()
        metrics.engine_ready("tiny", EngineReady(cache, {}, 259))
        [(labels, value)] = [(key, value) for key, value in samples(metrics).items() if "cache_config" in key[0]]
        names = ("cache_dtype", "kv_cache_bytes_per_token", "kv_cache_plain_bytes_per_token")
        assert value == 1 and all(f"{name}={word}" in labels for name, word in zip(names, words, strict=True)), labels


def test_counters_by_reason_start_at_zero_so_that_a_rate_sees_the_first_event():
    metrics = Metrics()
    seen = samples(metrics)
    metrics.rejected("max_num_queued_reqs")
    metrics.step(Stats(steps_total=1, evictions_total={"allocation": 1}, preemptions_total={"no_pages_left": 1}))
    grown = {key: value for key, value in samples(metrics).items() if key not in seen or value != seen[key]}
    assert {key: seen.get(key) for key in grown if "reason" in str(key)} == {
        ("octavo_requests_rejected_total", "reason=max_num_queued_reqs"): 0,
        ("octavo_kv_evictions_total", "reason=allocation"): 0,
        ("octavo_preemptions_total", "reason=no_pages_left"): 0,
    }


# ---------------------------------------------------------------------- histograms
def test_buckets_are_cumulative_and_bounds_inclusive():
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 5, 6):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1] and histogram.sum == 13.5


def test_token_buckets_reach_the_window():
    assert token_buckets(1) == (1,)
    assert token_buckets(8192) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    assert token_buckets(20) == (1, 2, 5, 10, 20)


def test_a35_buckets_can_answer_questions_of_latency():
    assert FIRST_TOKEN[0] <= 0.01 and FIRST_TOKEN[-1] >= 60 and LATENCY[-1] >= 600


def test_a_finished_sequence_is_timed(metrics: Metrics):
    metrics.finished(summary())
    seen = samples(metrics)
    times = {
        "e2e_request_latency_seconds": 7.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_prompt_tokens": 10,
        "request_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 6,
        "request_params_max_tokens": 20,
    }
    for name, value in times.items():
        assert seen[f"vllm:{name}_sum", *VLLM] == pytest.approx(value), name
        assert seen[f"vllm:{name}_count", *VLLM] == 1
    assert seen["vllm:request_success_total", VLLM[0], "finished_reason=stop", VLLM[1]] == 1


def test_a_sequence_that_never_ran_counts_where_it_got(metrics: Metrics):
    metrics.finished(summary(finish_reason="abort", generated_tokens=0, timings=Timings(arrival=10.0, finished=12.0)))
    seen = samples(metrics)
    assert seen["vllm:e2e_request_latency_seconds_sum", *VLLM] == 2
    assert seen["vllm:request_queue_time_seconds_count", *VLLM] == 0
    assert seen["vllm:request_prefill_time_seconds_count", *VLLM] == 0


def test_choices_of_one_request_count_its_parameters_once(metrics: Metrics):
    for index in range(12):
        metrics.finished(summary(request_id=f"r-{index}", n=12))
    seen = samples(metrics)
    assert seen["vllm:request_params_n_count", *VLLM] == 1 and seen["vllm:request_params_n_sum", *VLLM] == 12
    assert seen["vllm:request_generation_tokens_count", *VLLM] == 12


# ---------------------------------------------------------------------- snapshots
def test_gauges_are_the_snapshot(metrics: Metrics):
    metrics.step(
        Stats(running=3, waiting=2, waiting_tokens=40, pages_total=64, pages_free=40, pages_active=16, pages_cached=8,
              pages_shared=5, tokens_stored=192, steps_total=1, scheduled_tokens=9)
    )  # fmt: skip
    seen = samples(metrics)
    assert seen["vllm:num_requests_running", *VLLM] == 3 and seen["vllm:num_requests_waiting", *VLLM] == 2
    assert seen["vllm:kv_cache_usage_perc", *VLLM] == 0.25
    assert seen["octavo_kv_slot_utilization",] == 0.75 and seen["octavo_kv_pages_shared",] == 5
    states = {state: seen["octavo_kv_pages", f"state={state}"] for state in ("free", "active", "cached")}
    assert states == {"free": 40, "active": 16, "cached": 8} and sum(states.values()) == seen["octavo_kv_pool_pages",]
    assert seen["octavo_step_tokens",] == 9 and seen["octavo_prompt_tokens_waiting",] == 40


def test_a35_counters_never_go_backwards_when_an_engine_starts_anew(metrics: Metrics):
    metrics.step(Stats(steps_total=100, prefix_hits_total=50, preemptions_total={"out_of_pages": 2}, pages_total=64))
    metrics.step(Stats(steps_total=3, prefix_hits_total=5, preemptions_total={"out_of_pages": 1}, pages_total=64))
    seen = samples(metrics)
    assert seen["octavo_steps_total",] == 103 and seen["vllm:prefix_cache_hits_total", *VLLM] == 55
    assert seen["octavo_preemptions_total", "reason=out_of_pages"] == 3
    assert seen["octavo_kv_pool_pages",] == 64, "a gauge must not be summed"


def test_one_snapshot_seen_twice_is_one_step(metrics: Metrics):
    for _ in range(2):
        metrics.step(Stats(steps_total=1, scheduled_tokens=8))
    assert samples(metrics)["vllm:iteration_tokens_total_count", *VLLM] == 1


# ---------------------------------------------------------------------- exposition
def test_nothing_compatible_is_exported_before_there_is_a_model():
    assert not any(name.startswith("vllm:") for name, *_ in samples(Metrics()))


def test_metrics_compat_none(metrics: Metrics):
    seen = samples(metrics, compat=False)
    assert not any(name.startswith("vllm:") for name, *_ in seen) and ("octavo_steps_total",) in seen


def test_openmetrics_for_who_asks(metrics: Metrics):
    registry = build_registry(metrics, lambda: "ready", True, None)
    body, content_type = render(registry, "application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


def test_two_apps_do_not_share_a_registry(metrics: Metrics):
    build_registry(metrics, lambda: "ready", True, None)
    build_registry(Metrics(), lambda: "loading", True, None)
    assert samples(metrics)["octavo_engine_phase", "phase=ready"] == 1


def test_http_labels_are_bounded(metrics: Metrics):
    metrics.http_request("none", "BREW", 404, 0.01)
    metrics.http_request("/v1/completions", "POST", 0, 0.01)
    seen = samples(metrics)
    assert seen["http_requests_total", "handler=none", "method=other", "status=4xx"] == 1
    assert seen["http_requests_total", "handler=/v1/completions", "method=POST", "status=4xx"] == 1
