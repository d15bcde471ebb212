"""The queries that dashboards and alerts ask: ours from configs/, those of public vLLM dashboards written out."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PROMETHEUS = ROOT / "configs" / "prometheus"
DASHBOARD = ROOT / "configs" / "grafana" / "dashboards" / "octavo.json"
METRIC = re.compile(r"\b(?:octavo_|vllm:|http_|process_|python_)\w+|\bup\b")

_QUANTILE = "histogram_quantile({q}, sum by(le) (rate(vllm:{name}_bucket{m}[{r}])))"
_MEAN = "rate(vllm:{name}_sum{m}[{r}]) / rate(vllm:{name}_count{m}[{r}])"
_MODEL = '{model_name="$model_name"}'
_DEPLOYMENT = '{model_name=~"$Deployment_id"}'


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels but rows, those inside collapsed rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels(json.loads(DASHBOARD.read_text())) for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def public_queries() -> list[str]:
    """Of vLLM's example dashboards (grafana.json, performance_statistics.json, query_statistics.json) and of
    production-stack's two, except for what its router and its Kubernetes labels bring."""
    return list(dict.fromkeys([*_grafana(), *_performance_statistics(), *_query_statistics(), *_production_stack()]))


def _grafana() -> Iterator[str]:
    """Also production-stack's dashboard of one model, which has request_time_per_output_token_seconds."""
    r = "$__rate_interval"
    for name in (
        "e2e_request_latency_seconds",
        "inter_token_latency_seconds",
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
    ):
        for q in ("0.99", "0.95", "0.9", "0.5"):
            yield _QUANTILE.format(q=q, name=name, m=_MODEL, r=r)
        yield _MEAN.format(name=name, m=_MODEL, r=r)
    for name in (
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "request_max_num_generation_tokens_sum",
    ):
        yield f"rate(vllm:{name}{_MODEL}[{r}])"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        yield f"vllm:{name}{_MODEL}"
    for name in ("request_prompt_tokens_bucket", "request_generation_tokens_bucket"):
        yield f"sum by(le) (increase(vllm:{name}{_MODEL}[{r}]))"
    yield f"sum by(finished_reason) (increase(vllm:request_success_total{_MODEL}[{r}]))"


def _performance_statistics() -> Iterator[str]:
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"):
        yield _MEAN.format(name=name, m="", r="$__rate_interval")
        yield f"(sum(increase(vllm:{name}_sum[$__range])) / sum(increase(vllm:{name}_count[$__range])))"
        for q in ("0.50", "0.90", "0.99"):
            yield _QUANTILE.format(q=q, name=name, m="", r="$__range")
            yield _QUANTILE.format(q=q, name=name, m="", r="$__rate_interval")
    for name in ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count"):
        yield f"rate(vllm:{name}[$__rate_interval])"


def _query_statistics() -> Iterator[str]:
    def rate(name: str) -> str:
        return f"rate(vllm:{name}{_DEPLOYMENT}[$__rate_interval])"

    for name in ("request_success_total", "prompt_tokens_total", "generation_tokens_total"):
        yield f"sum by (model_name) (\n  {rate(name)}\n)"
        yield f"sum({rate(name)})"
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
        for q in ("0.50", "0.90", "0.99"):
            yield f"histogram_quantile({q}, sum by(le, model_name) ({rate(name + '_bucket')}))"
    yield f"sum by (le, model_name) ({rate('request_prompt_tokens_bucket')})"
    yield f"sum({rate('prompt_tokens_total')})\n/\nsum({rate('request_success_total')})"


def _production_stack() -> Iterator[str]:
    for name in ("e2e_request_latency_seconds", "request_time_per_output_token_seconds"):
        yield f"avg(vllm:{name}_sum) / avg(vllm:{name}_count)"
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
        yield f"sum by(le) (vllm:{name}_bucket)"
    yield from ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    yield "vllm:gpu_prefix_cache_hits_total / vllm:gpu_prefix_cache_queries_total"
