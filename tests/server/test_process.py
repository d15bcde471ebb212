"""The real command in its own process: exit codes, one sentence for what is wrong, drain, no child left (A39)."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue

import httpx2
import psutil
import pytest
import tiny_models

PATIENCE = 60.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("served") / "tiny")


class Command:
    """A running `octavo serve`; its standard output is read line by line."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "server", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | environ,
        )
        self.lines: Queue[str] = Queue()
        self.block: list[str] = []
        """What of standard output has been read, up to the address."""
        self.errors: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.put(line)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.errors.append(line)

    def address(self) -> str:
        """From the start-up block."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=1.0)
            except Empty:
                assert self.process.poll() is None, "".join(self.errors)
                continue
            self.block.append(line)
            if found := re.search(r"address\s+(https?://\S+)", line):
                return found[1]
        raise AssertionError("no start-up block: " + "".join(self.errors))

    def wait(self) -> int:
        """The exit code; all that was printed has then been read."""
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def serving(
    model: Path, *arguments: str, trusting: ssl.SSLContext | bool = True, **environ: str
) -> Iterator[tuple[Command, httpx2.Client]]:
    flags = ("--port", "0", "--num-gpu-blocks-override", "64", "--num-threads", "1", *arguments)
    command = Command(str(model), *flags, **environ)
    try:
        with httpx2.Client(base_url=command.address(), timeout=PATIENCE, verify=trusting) as http:
            yield command, http
    finally:
        command.process.kill()
        command.wait()


def refusal(*arguments: str) -> str:
    """What a command that cannot start says: one line, exit code 2, no traceback."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "server", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert "Traceback" not in result.stderr
    [said] = [line for line in result.stderr.splitlines() if line.startswith("octavo: ")]
    return said


# ------------------------------------------------------------------ cannot start
def test_unknown_file() -> None:
    assert "--model" in refusal("/nowhere/model.gguf")


def test_unknown_architecture(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refusal(str(tmp_path))
    assert "MambaForCausalLM" in said and "LlamaForCausalLM" in said


def test_damaged_weights(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(str(tmp_path))


def test_too_little_memory(tiny: Path) -> None:
    said = refusal(str(tiny), "--kv-cache-memory-bytes", "100TiB")
    assert "--kv-cache-memory-bytes" in said


def test_port_in_use(tiny: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "--port" in refusal(str(tiny), "--port", str(other.getsockname()[1]))


def test_unknown_flag(tiny: Path) -> None:
    assert "--max-model-len" in refusal(str(tiny), "--max-model-length", "5")


def copy_packages(target: Path) -> None:
    """Without compiled kernels."""
    for package in ("configs", "engine", "kernels", "server"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def test_the_engine_is_of_the_same_copy_as_the_server(tiny: Path, tmp_path: Path) -> None:
    """`python -m server` in a checkout, while another one is installed."""
    copy_packages(tmp_path)
    (tmp_path / "engine" / "process.py").write_text("import sys; sys.exit('the engine of the copy')")
    command = [sys.executable, "-m", "server", str(tiny), "--port", "0"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 2 and "the engine of the copy" in result.stderr


# ------------------------------------------------------------------ without a compiler
def test_serves_without_a_compiler_and_says_so(tiny: Path, tmp_path: Path) -> None:
    """A copy of the packages without a library, no compiler on PATH, an empty cache of kernels."""
    copy_packages(tmp_path)
    environ = {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path / "nothing"), "HOME": str(tmp_path / "home")}
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    with serving(tiny, **environ) as (command, http):
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        lines = dict(re.findall(r"^  (\w[\w ]*?)  +(.+)$", "".join(command.block), re.MULTILINE))
    assert lines["attention"].startswith("torch reference (not C++ AMX bf16, ")
    for line in (lines["attention"], lines["linear"]):
        assert line.count("no C++ compiler") == 1 and line.endswith("; install g++ and start again)")
    logged = [json.loads(line) for line in command.errors]
    [warning] = [
        line for line in logged if line["level"] == "warning" and line["logger"] == "octavo.kernels.cpu.library"
    ]
    assert "No native kernels: no C++ compiler" in warning["message"] and "install g++" in warning["message"]
    assert not list((tmp_path / "home").rglob("*.so"))


# ------------------------------------------------------------------ lives and ends
def test_a39_serves_drains_and_leaves_nothing_behind(tiny: Path) -> None:
    with serving(tiny) as (command, http):
        assert http.get("/readyz").status_code == 200
        [engine] = command.children()
        body = {"prompt": "hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert command.wait() == 0
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_a39_a_long_stream_ends_with_an_error_when_the_drain_time_is_over(tiny: Path) -> None:
    with serving(tiny, "--shutdown-timeout", "0") as (command, http):
        body = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            command.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        finished = any('"finish_reason":"length"' in line for line in rest)
        assert finished or "error" in json.loads(rest[-2].removeprefix("data: "))
        assert command.wait() == 0


def test_a07_a_killed_engine_fails_requests_and_ends_the_server(tiny: Path) -> None:
    with serving(tiny) as (command, http):
        [engine] = command.children()
        body = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        engine.suspend()  # so that the request is certainly still open
        with http.stream("POST", "/v1/completions", json=body) as answer:
            engine.kill()
            text = "".join(answer.iter_text())
        assert answer.status_code >= 500 or '"error"' in text
        assert command.wait() == 1
        assert "signal 9" in "".join(command.errors)


def test_the_engine_ends_with_a_killed_server(tiny: Path) -> None:
    with serving(tiny) as (command, _):
        [engine] = command.children()
        command.process.kill()
        command.wait()
        engine.wait(PATIENCE)


# ------------------------------------------------------------------ the log
def test_both_processes_log_json_lines_where_there_is_no_terminal(tiny: Path) -> None:
    with serving(tiny, "--log-level", "debug") as (command, http):
        body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        assert http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).status_code == 200
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0
    logged = [json.loads(line) for line in command.errors]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in logged)
    assert {line["logger"].partition(".")[0] for line in logged} == {"octavo"}
    [request] = [line for line in logged if line["logger"] == "octavo.access"]
    assert (request["id"], request["generated_tokens"], request["finish_reason"]) == ("mine", 3, "length")
    assert "hello" not in "".join(command.errors)


def test_words_are_logged_if_asked_for(tiny: Path) -> None:
    with serving(tiny, "--log-format", "text") as (command, http):
        http.get("/v1/models")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 0
    assert re.search(r"^\d{4}-.* INFO octavo\.access: GET '/v1/models' 200 .* id=\w+$", "".join(command.errors), re.M)
    assert not any(line.startswith("{") for line in command.errors)


def test_an_engine_that_dies_logs_json_too(tiny: Path) -> None:
    with serving(tiny) as (command, _):
        [engine] = command.children()
        engine.kill()
        assert command.wait() == 1
    [said] = [line for line in map(json.loads, command.errors) if line["level"] == "error"]
    assert said["logger"] == "octavo.server" and "signal 9" in said["message"]


# ------------------------------------------------------------------ HTTPS
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_https(tiny: Path, tmp_path: Path) -> None:
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=octavo", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [*new, *names, "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    files = ("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    trusting = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with serving(tiny, *files, trusting=trusting) as (command, http):
        body = {"prompt": "hello", "max_tokens": 3}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] <= 3
        assert str(http.base_url).startswith("https://127.0.0.1:")


def test_a_certificate_that_is_not_there(tiny: Path) -> None:
    said = refusal(str(tiny), "--ssl-certfile", "/nowhere/cert.pem")
    assert said == "octavo: --ssl-certfile /nowhere/cert.pem cannot be read: no such file or directory."
