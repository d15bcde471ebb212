"""A real Prometheus scrapes a loaded server. Needs `prometheus` and `promtool` (Debian: apt install prometheus)."""

import json
import math
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from kit import ScriptedServer, endless, eventually
from monitoring import DASHBOARD, PROMETHEUS, ROOT, alerts, dashboard_queries, public_queries

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed (promtool)"),
]

WINDOW = "30s"
VARIABLES = {
    "$__rate_interval": WINDOW,
    "$__range": WINDOW,
    "$instance": ".*",
    "$model_name": "scripted",
    "$Deployment_id": "scripted",
}
SCRAPES = 8
CLIENTS = 6
MOST_REQUESTS = 2000


def promtool(*arguments: str | Path) -> None:
    result = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", PROMETHEUS / "alerts.yml")


def test_each_alert_fires_and_does_not_fire() -> None:
    promtool("test", "rules", ROOT / "tests" / "ship" / "alerts_test.yml")


def test_promtool_accepts_what_the_server_exports() -> None:
    with ScriptedServer({"s": b"AB"}) as server:
        server.completion("s")
        body = server.http.get("/metrics").content
    result = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, timeout=60)
    complaints = [line for line in result.stderr.decode().splitlines() if not _is_a_matter_of_names(line)]
    assert not complaints and result.returncode in (0, 3), result.stderr.decode()


def _is_a_matter_of_names(complaint: str) -> bool:
    """Colons are kept for recording rules and `_total` for counters: vLLM's names break both, and are kept."""
    return complaint.startswith(("vllm:", "python_gc"))


# ---------------------------------------------------------------------- live
class Scraper:
    """The shipped configuration, pointed at a server of this test and hurried."""

    def __init__(self, folder: Path, target: str) -> None:
        self.port = next(port for port in range(8400, 8500) if _is_free(port))
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            address = target if job["job_name"] == "octavo" else f"127.0.0.1:{self.port}"
            job["static_configs"] = [{"targets": [address]}]
        shutil.copy(PROMETHEUS / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._folder = folder
        self._http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20, trust_env=False)

    def __enter__(self) -> "Scraper":
        arguments = [
            "prometheus",
            f"--config.file={self._folder}/prometheus.yml",
            f"--storage.tsdb.path={self._folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        eventually(self._is_ready)
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(20)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx2.TransportError:
            return False

    def get(self, path: str, **params: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """Of a vector; NaN and infinities left out: they draw nothing."""
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        numbers = [float(sample["value"][1]) for sample in self.get("query", query=query)["result"]]
        return [number for number in numbers if math.isfinite(number)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Load:
    """Clients that ask for more than the pool holds, with a beginning in common, until told to stop."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, number: int) -> None:
        for turn in range(MOST_REQUESTS):
            prompt = f"All of these begin alike, {number} and {turn} differ: long"
            self._server.stream_completion(prompt, max_tokens=150)  # any two together overflow the pool
            if self._stop.wait(0.02):
                return


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraper]:
    """Has scraped a server under load a few times; the load goes on."""
    with (
        ScriptedServer({"long": endless}, num_blocks=64) as server,
        Scraper(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{server.port}") as scraper,
    ):
        enough = f'count_over_time(octavo_steps_total{{job="octavo"}}[{WINDOW}]) >= {SCRAPES}'
        with Load(server):
            eventually(lambda: bool(scraper.values(enough)), 60)
            yield scraper


def test_the_load_makes_what_there_is_to_see(prometheus: Scraper) -> None:
    for name in ("octavo_preemptions_total", "octavo_kv_evictions_total", "octavo_prefill_tokens_saved_total"):
        assert sum(prometheus.values(f"increase({name}[{WINDOW}])")) > 0, name


@pytest.mark.parametrize("query", dashboard_queries())
def test_every_query_of_the_dashboard_returns_data(prometheus: Scraper, query: str) -> None:
    assert prometheus.values(query), query


@pytest.mark.parametrize("query", public_queries())
def test_every_query_of_public_dashboards_returns_data(prometheus: Scraper, query: str) -> None:
    assert prometheus.values(query), query


def test_variables_of_dashboards_have_values(prometheus: Scraper) -> None:
    assert "scripted" in prometheus.get("label/model_name/values")
    for name in ("vllm:generation_tokens_total", "vllm:request_success_total"):
        assert prometheus.get("label/model_name/values", **{"match[]": name}) == ["scripted"]
    [variable] = [v for v in json.loads(DASHBOARD.read_text())["templating"]["list"] if v["name"] == "instance"]
    assert variable["definition"] == "label_values(octavo_build_info, instance)"
    assert len(prometheus.get("label/instance/values", **{"match[]": "octavo_build_info"})) == 1


def test_prometheus_evaluates_every_alert_without_complaint(prometheus: Scraper) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in rules()} == {
        rule["alert"]: ("ok", "") for rule in alerts()
    }
