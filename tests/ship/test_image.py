"""Dockerfile, .dockerignore, docker-compose.yml and .env.example, as far as they can be checked without Docker."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit import PATIENCE, ScriptedServer, endless, eventually
from monitoring import ROOT

from configs.load import load
from configs.settings import Settings

DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n", "", re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
    if line.strip()
]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVERS = {name: service for name, service in COMPOSE["services"].items() if name.startswith("server-")}


def instructions(name: str, after: str = "") -> list[str]:
    """Arguments of every instruction `name`, from the stage `after` on."""
    start = next((i for i, (word, rest) in enumerate(INSTRUCTIONS) if word == "FROM" and rest.endswith(after)), 0)
    return [rest.strip() for word, rest in INSTRUCTIONS[start if after else 0 :] if word == name]


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def default(text: str) -> str:
    """'${NAME:-value}' → 'value'"""
    return re.fullmatch(r"\$\{\w+:-(.*)\}", text)[1]


# ---------------------------------------------------------------------- Dockerfile
def test_the_targets_exist() -> None:
    stages = [rest.split(" AS ")[1] for rest in instructions("FROM")]
    assert {"cpu", "cuda", "flash-attn-on", "flash-attn-off"} <= set(stages)
    assert stages[-1] == "cpu"
    assert {service["build"]["target"] for service in SERVERS.values()} == {"cpu", "cuda"}


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    for rest in instructions("COPY"):
        if "--from=" in rest:
            continue
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in patterns, f"{source} is kept out of the build by .dockerignore"


@pytest.mark.parametrize("path", [".git", ".env", "tests", "docs", "configs/grafana", "shared", "kernels/cpu/x.so"])
def test_what_a_build_does_not_need_stays_out(path: str) -> None:
    ignored = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern.startswith("#") or not pattern:
            continue
        negated, pattern = pattern.startswith("!"), pattern.removeprefix("!").removeprefix("**/")
        if any(fnmatch.fnmatch(part, pattern) for part in (path, path.split("/")[0], Path(path).name)):
            ignored = not negated
    assert ignored


def test_every_package_is_copied() -> None:
    copied = {rest.split()[0] for rest in instructions("COPY")}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= copied


def test_the_final_images_have_no_compiler_and_no_root() -> None:
    assert not any("apt-get" in rest for rest in instructions("RUN", after="AS runtime"))
    assert instructions("USER", after="AS runtime") == ["1000:0"]
    for target in ("cpu", "cuda"):
        assert f"runtime AS {target}" in instructions("FROM")


def test_arguments_after_the_image_are_those_of_octavo_serve() -> None:
    [entrypoint] = instructions("ENTRYPOINT")
    assert json.loads(entrypoint) == ["octavo", "serve"] and not instructions("CMD")
    assert instructions("STOPSIGNAL") == ["SIGTERM"]


def test_flash_attn_is_off_unless_asked_for() -> None:
    assert "FLASH_ATTN=off" in instructions("ARG")
    assert default(SERVERS["server-gpu"]["build"]["args"]["FLASH_ATTN"]) == "off"


def test_variables_of_the_image_are_settings() -> None:
    variables = dict(re.findall(r"(OCTAVO_\w+)=(\S+)", " ".join(instructions("ENV"))))
    assert load([], variables).settings.bind_host == "0.0.0.0"


# ---------------------------------------------------------------------- health check
def check_health(port: int, **variables: str) -> int:
    """The image's own command, at another port."""
    [check] = instructions("HEALTHCHECK")
    command = json.loads(check[check.index("CMD") + 3 :])
    assert command[0] == "python"
    environment = {**os.environ, "OCTAVO_PORT": str(port), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, *command[1:]], env=environment, timeout=PATIENCE).returncode


def test_a_ready_server_is_healthy() -> None:
    with ScriptedServer({"s": b"A"}) as server:
        assert check_health(server.port) == 0


def test_a_loading_server_is_not_healthy_yet() -> None:
    loads = threading.Event()
    with ScriptedServer({"s": b"A"}, loads=loads) as server:
        assert check_health(server.port) == 1
        loads.set()
        eventually(lambda: server.http.get("/ready").status_code == 200)
        assert check_health(server.port) == 0


def test_a_full_queue_is_healthy() -> None:
    with ScriptedServer({"long": endless}, max_num_seqs=1, max_num_queued_reqs=1) as server:
        server.executor.hold()
        with server.open_request("long"), server.open_request("long"):
            eventually(lambda: server.http.get("/ready").json()["phase"] == "overloaded")
            assert check_health(server.port) == 0
            server.executor.allow(None)


def test_no_server_is_not_healthy() -> None:
    with ScriptedServer({"s": b"A"}) as server:
        port = server.port
    assert check_health(port) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_server_behind_tls_is_healthy(tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "server.pem"), str(tmp_path / "server.key")
    new = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    where = ("-subj", "/CN=octavo.example", "-keyout", key, "-out", certificate)
    subprocess.run([*new, *where], check=True, capture_output=True)
    with ScriptedServer({"s": b"A"}, ssl_certfile=certificate, ssl_keyfile=key) as server:
        assert check_health(server.port, OCTAVO_SSL_CERTFILE=certificate) == 0
        assert check_health(server.port) == 1


# ---------------------------------------------------------------------- compose
def test_bare_up_with_the_example_starts_server_prometheus_and_grafana() -> None:
    profile = example()["COMPOSE_PROFILES"]
    started = {name for name, service in COMPOSE["services"].items() if profile in service["profiles"]}
    assert profile == "gpu" and started == {"server-gpu", "prometheus", "grafana"}


def test_without_a_profile_nothing_starts() -> None:
    for name, service in COMPOSE["services"].items():
        assert set(service["profiles"]) in ({"gpu", "cpu"}, {name.removeprefix("server-")})


def test_everything_is_published_on_loopback_by_default() -> None:
    for service in COMPOSE["services"].values():
        for port in service["ports"]:
            assert port.startswith(("127.0.0.1:", "${PUBLISH_ADDRESS:-127.0.0.1}:")), port


def test_a_server_open_to_the_network_without_a_key_does_not_start() -> None:
    for service in SERVERS.values():
        with_key, without = re.fullmatch(
            r"\$\{(OCTAVO_API_KEY):-\$\{PUBLISH_ADDRESS:\+(.*)\}\}", service["environment"]["OCTAVO_API_KEY"]
        ).groups()
        with pytest.raises(Exception, match="--api-key must be printable ASCII without spaces"):
            load([], {with_key: without})


def test_settings_in_compose_and_in_the_example_exist() -> None:
    fixed = {}
    for service in SERVERS.values():
        fixed = {name: value for name, value in service["environment"].items() if name.startswith("OCTAVO_")}
        load([], {name: "" if "$" in value else value for name, value in fixed.items()})
        assert service["ports"][0].endswith(":" + fixed["OCTAVO_PORT"])
    assert int(fixed["OCTAVO_PORT"]) == Settings().port and f"EXPOSE {Settings().port}" in DOCKERFILE
    load([], {name: value for name, value in example(comments=True).items() if name.startswith("OCTAVO_")})


def test_every_variable_of_compose_stands_in_the_example_with_its_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    known = example(comments=True)
    for name, value in re.findall(r"\$\{(\w+):-([^}$]*)\}", text):
        assert name in known, name
        assert known[name] in ("", value) or name == "OCTAVO_MODEL", name


def test_the_server_may_drain_before_it_is_killed() -> None:
    for service in SERVERS.values():
        assert seconds(default(service["stop_grace_period"])) >= Settings().shutdown_timeout + 10


def test_a_first_download_has_time() -> None:
    assert "--start-period=1h" in instructions("HEALTHCHECK")[0]
    for service in SERVERS.values():
        assert seconds(service["healthcheck"]["start_period"]) >= 600 and "test" not in service["healthcheck"]


def test_models_are_kept_and_found_again() -> None:
    [folder] = json.loads(instructions("VOLUME")[0])
    for service in SERVERS.values():
        assert f"model-cache:{folder}" in service["volumes"]
    assert "model-cache" in COMPOSE["volumes"]
    assert "HOME=" + str(Path(folder).parent) in " ".join(instructions("ENV"))


def test_the_gpu_server_gets_a_gpu() -> None:
    [device] = SERVERS["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] and "shm_size" in SERVERS["server-gpu"]
    assert "deploy" not in SERVERS["server-cpu"]


def test_prometheus_scrapes_whichever_server_runs() -> None:
    config = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    [job] = [job for job in config["scrape_configs"] if job["job_name"] == "octavo"]
    for service in SERVERS.values():
        [alias] = service["networks"]["default"]["aliases"]
        assert job["static_configs"] == [{"targets": [f"{alias}:{Settings().port}"]}]


def test_mounted_files_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).is_dir(), volume


def example(comments: bool = False) -> dict[str, str]:
    """Variables of .env.example; those in comments too, if asked."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    found = [re.fullmatch(r"(# )?([A-Z_]+)=(\S*)", line) for line in lines]
    return {match[2]: match[3] for match in found if match and (comments or not match[1])}


# ---------------------------------------------------------------------- with tools
def tool(name: str) -> Any:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


@pytest.mark.e2e
@tool("hadolint")
def test_hadolint_has_nothing_to_say() -> None:
    assert subprocess.run(["hadolint", ROOT / "Dockerfile"], timeout=60).returncode == 0


@pytest.mark.e2e
@tool("docker-compose")
@pytest.mark.parametrize(
    ("variables", "services", "address"),
    [
        ({"COMPOSE_PROFILES": "gpu"}, {"server-gpu", "prometheus", "grafana"}, "127.0.0.1"),
        ({"COMPOSE_PROFILES": "cpu"}, {"server-cpu", "prometheus", "grafana"}, "127.0.0.1"),
        ({"COMPOSE_PROFILES": "cpu", "OCTAVO_API_KEY": "k"}, {"server-cpu", "prometheus", "grafana"}, "127.0.0.1"),
        (
            {"COMPOSE_PROFILES": "cpu", "OCTAVO_API_KEY": "k", "PUBLISH_ADDRESS": "0.0.0.0"},
            {"server-cpu", "prometheus", "grafana"},
            "0.0.0.0",
        ),
        ({}, set(), ""),
    ],
)
def test_compose_reads_it(tmp_path: Path, variables: dict[str, str], services: set[str], address: str) -> None:
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)  # beside no .env
    result = subprocess.run(
        ["docker-compose", "config", "--format", "json"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    read = json.loads(result.stdout)["services"]
    assert set(read) == services
    for name, service in read.items():
        if name.startswith("server-"):
            assert service["ports"][0]["host_ip"] == address
            assert service["environment"]["OCTAVO_API_KEY"] == variables.get("OCTAVO_API_KEY", "")
