"""What the alerts and the dashboard say is true of this server: names, labels, flags. No Prometheus needed."""

import json
import re
from itertools import combinations

import pytest
import yaml
from monitoring import DASHBOARD, METRIC, PROMETHEUS, ROOT, alerts, dashboard_queries, panels, public_queries
from prometheus_client.parser import text_string_to_metric_families

from configs.settings import Settings, flag
from engine import EngineReady, Stats
from engine.messages import CacheInfo
from server.exposition import build_registry, render
from server.metrics import Metrics

GRAFANA = ROOT / "configs" / "grafana"


@pytest.fixture(scope="module")
def exported() -> dict[str, dict[str, set[str]]]:
    """Sample name → label → the values seen of it."""
    metrics = Metrics()
    metrics.engine_ready("m", EngineReady(CacheInfo(64, 16, 4096, 256, "bf16", 512, True), {}, 259))
    metrics.step(Stats(steps_total=1))
    metrics.http_request("/v1/models", "GET", 200, 0.1)
    body, _ = render(build_registry(metrics, lambda: "ready", True, None), None)
    names: dict[str, dict[str, set[str]]] = {"up": {}}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = names.setdefault(sample.name, {})
            for key, value in sample.labels.items():
                labels.setdefault(key, set()).add(value)
    return names


QUERIES = [*dashboard_queries(), *public_queries(), *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("query", QUERIES)
def test_every_metric_of_a_query_is_exported(query: str, exported) -> None:
    names = METRIC.findall(query)
    assert names and not set(names) - set(exported), query


@pytest.mark.parametrize("query", QUERIES)
def test_labels_of_a_query_exist_with_the_values_it_asks_for(query: str, exported) -> None:
    for name, selector in re.findall(rf"({METRIC.pattern})(?:\{{([^}}]*)\}})", query):
        for label, pattern in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            if label in ("job", "instance") or pattern.startswith("$"):
                continue  # Prometheus' own labels; the dashboards' variables
            assert label in exported[name], f"{name} has no label {label}"
            for value in pattern.split("|"):
                assert value in exported[name][label], f"{name}: {label} is never {value}"
    for labels in re.findall(r"\bby ?\(([^)]*)\)", query):
        known = {"job", "instance", "le", *(label for name in METRIC.findall(query) for label in exported[name])}
        assert {label.strip() for label in labels.split(",")} <= known, query


def test_the_job_that_alerts_ask_for_is_the_one_that_scrapes() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert "octavo" in [job["job_name"] for job in config["scrape_configs"]]
    assert config["rule_files"] == ["alerts.yml"]
    for rule in alerts():
        assert 'job="octavo"' in rule["expr"], rule["alert"]


def test_alerts_give_advice_and_their_flags_exist() -> None:
    flags = {flag(name) for name in Settings.model_fields} | {"--metrics-compat"}
    for rule in alerts():
        assert set(rule["annotations"]) == {"summary", "advice"} and rule["labels"]["severity"] in (
            "critical",
            "warning",
        )
        assert set(re.findall(r"--[a-z-]+", str(rule["annotations"]))) <= flags, rule["alert"]


def test_pressure_on_the_kv_cache_is_told_apart_by_preemptions() -> None:
    [rule] = [rule for rule in alerts() if rule["alert"] == "OctavoKVCacheThrashing"]
    assert "vllm:kv_cache_usage_perc" in rule["expr"] and "increase(vllm:num_preemptions_total" in rule["expr"]
    for word in ("--max-model-len", "quantise", "memory or GPUs"):
        assert word in rule["annotations"]["advice"]


def test_every_alert_is_tested_firing_and_not_firing() -> None:
    tests = yaml.safe_load((ROOT / "tests" / "ship" / "alerts_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test["promql_expr_test"]]
    for rule in alerts():
        mine = [check for check in checks if f'"{rule["alert"]}"' in check["expr"]]
        assert {bool(check.get("exp_samples")) for check in mine} == {True, False}, rule["alert"]


def test_every_alert_is_documented() -> None:
    documented = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "monitoring.md").read_text(), re.MULTILINE)
    assert documented == [rule["alert"] for rule in alerts()]


# ---------------------------------------------------------------------- the dashboard
@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def test_the_dashboard_shows_what_matters(dashboard) -> None:
    asked = " ".join(dashboard_queries())
    for name in (
        "vllm:kv_cache_usage_perc",
        "octavo_prefill_tokens_saved_total",
        "octavo_preemptions_total",
        "octavo_kv_evictions_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "octavo_sequences_waiting",
        "octavo_sequences_running",
        "octavo_generated_tokens_total",
        "octavo_kv_pages",
        "octavo_kv_slot_utilization",
    ):
        assert name in asked, name


def test_panels_have_ids_sources_and_places_of_their_own(dashboard) -> None:
    every = [*dashboard["panels"], *panels(dashboard)]
    ids = {panel["id"]: panel for panel in every}
    assert len(ids) == len(dashboard["panels"])
    for panel in panels(dashboard):
        assert panel["title"] and panel["description"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in combinations([panel["gridPos"] for panel in dashboard["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


def test_variables_of_the_queries_are_defined(dashboard) -> None:
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text()))
    assert used - {"__rate_interval", "__all"} == defined


def test_grafana_finds_the_dashboard_and_the_data_where_compose_puts_them() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/octavo.yml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["./configs/grafana/dashboards"]
    assert mounts["./configs/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]
