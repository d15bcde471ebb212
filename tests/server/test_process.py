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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue

import httpx2
import psutil
import pytest
import tiny_models
from kit import eventually

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


def raw_connection(http: httpx2.Client) -> socket.socket:
    return socket.create_connection((http.base_url.host, http.base_url.port or 80), PATIENCE)


def head(method: str, path: str, length: int, **headers: str) -> bytes:
    fields = {"Host": "test", "Content-Length": str(length), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


# ------------------------------------------------------------------ cannot start
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


def of_an_unknown_architecture(tiny: Path, folder: Path) -> str:
    config = json.loads((tiny / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return refusal(str(folder))


def of_damaged_weights(tiny: Path, folder: Path) -> str:
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return refusal(str(folder))


def of_a_port_in_use(tiny: Path, folder: Path) -> str:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        return refusal(str(tiny), "--port", str(other.getsockname()[1]))


REFUSED: dict[str, Callable[[Path, Path], str]] = {
    "file": lambda tiny, folder: refusal("/nowhere/model.gguf"),
    "architecture": of_an_unknown_architecture,
    "weights": of_damaged_weights,
    "memory": lambda tiny, folder: refusal(str(tiny), "--kv-cache-memory-bytes", "100TiB"),
    "port": of_a_port_in_use,
    "flag": lambda tiny, folder: refusal(str(tiny), "--max-model-length", "5"),
    "certificate": lambda tiny, folder: refusal(str(tiny), "--ssl-certfile", "/nowhere/cert.pem"),
}


@pytest.fixture(scope="module")
def refused(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """All of them, two at a time: a process spends its life in imports on one core."""
    with ThreadPoolExecutor(2) as lanes:
        yield {name: lanes.submit(start, tiny, tmp_path_factory.mktemp(name)) for name, start in REFUSED.items()}


def test_the_engine_learns_no_secrets(tiny: Path) -> None:
    """Where a model's own code may run, neither its variables nor its command line hold keys."""
    secrets = {"OCTAVO_API_KEY": "key-1", "OCTAVO_ADMIN_API_KEY": "key-2", "HF_TOKEN": "hf_3"}
    with serving(tiny, **secrets, OCTAVO_MAX_NUM_SEQS="4") as (command, http):
        assert http.get("/v1/models", headers={"authorization": "Bearer key-1"}).status_code == 200
        [engine] = command.children()
        assert engine.environ()["OCTAVO_MAX_NUM_SEQS"] == "4"
        known = " ".join([*engine.environ().values(), *engine.cmdline()])
        assert not any(secret in known for secret in secrets.values())


def test_unknown_file(refused: dict[str, Future[str]]) -> None:
    assert "--model" in refused["file"].result()


def test_unknown_architecture(refused: dict[str, Future[str]]) -> None:
    said = refused["architecture"].result()
    assert "MambaForCausalLM" in said and "LlamaForCausalLM" in said


def test_damaged_weights(refused: dict[str, Future[str]]) -> None:
    assert "model.safetensors" in refused["weights"].result()


def test_too_little_memory(refused: dict[str, Future[str]]) -> None:
    assert "--kv-cache-memory-bytes" in refused["memory"].result()


def test_port_in_use(refused: dict[str, Future[str]]) -> None:
    assert "--port" in refused["port"].result()


def test_unknown_flag(refused: dict[str, Future[str]]) -> None:
    assert "--max-model-len" in refused["flag"].result()


def test_a_certificate_that_is_not_there(refused: dict[str, Future[str]]) -> None:
    expected = "octavo: --ssl-certfile /nowhere/cert.pem cannot be read: no such file or directory."
    assert refused["certificate"].result() == expected


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
@dataclass
class Life:
    """What was seen of a server that has ended."""

    code: int
    errors: list[str]
    """What it logged, line by line."""
    engine_left: bool
    stream: list[str]
    """Lines of the answer that was under way."""


BODY = {"prompt": "hello", "temperature": 0, "ignore_eos": True}


def signalled(command: Command, http: httpx2.Client, number: signal.Signals, max_tokens: int) -> Life:
    """The signal comes in the middle of a stream."""
    [engine] = command.children()
    with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": max_tokens, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        command.process.send_signal(number)
        rest = [line for line in lines if line]
    code = command.wait()
    return Life(code, command.errors, engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE, rest)


@pytest.fixture(scope="module")
def drained(tiny: Path) -> Life:
    with serving(tiny, "--log-level", "debug") as (command, http):
        assert http.get("/readyz").status_code == 200
        asked = http.post("/v1/completions", json={**BODY, "max_tokens": 3}, headers={"x-request-id": "mine"})
        assert asked.status_code == 200
        return signalled(command, http, signal.SIGTERM, max_tokens=60)


def test_a39_serves_drains_and_leaves_nothing_behind(drained: Life) -> None:
    assert "data: [DONE]" in drained.stream and any('"finish_reason":"length"' in line for line in drained.stream)
    assert drained.code == 0 and not drained.engine_left
    said = [json.loads(line)["message"] for line in drained.errors]
    assert said.index("drained: all requests have ended") > said.index(
        "draining: open requests have 30 s; a second signal (Ctrl-C) stops at once"
    )


def test_both_processes_log_json_lines_where_there_is_no_terminal(drained: Life) -> None:
    logged = [json.loads(line) for line in drained.errors]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in logged)
    assert {line["logger"].partition(".")[0] for line in logged} == {"octavo"}
    requests = [line for line in logged if line["logger"] == "octavo.access" and line["path"] == "/v1/completions"]
    seen = [(each["generated_tokens"], each["finish_reason"]) for each in requests]
    assert seen == [(3, "length"), (60, "length")] and requests[0]["id"] == "mine"
    assert "hello" not in "".join(drained.errors)


@pytest.fixture(scope="module")
def cut_short(tiny: Path) -> Life:
    with serving(tiny, "--shutdown-timeout", "0", "--log-format", "text") as (command, http):
        http.get("/v1/models")
        return signalled(command, http, signal.SIGINT, max_tokens=400)


def test_a39_a_long_stream_ends_with_an_error_when_the_drain_time_is_over(cut_short: Life) -> None:
    assert cut_short.stream[-1] == "data: [DONE]"
    finished = any('"finish_reason":"length"' in line for line in cut_short.stream)
    assert finished or "error" in json.loads(cut_short.stream[-2].removeprefix("data: "))
    assert cut_short.code == 0
    drained = "all requests have ended" if finished else "still open and cut off: 1 (--shutdown-timeout)"
    assert f"drained: {drained}" in "".join(cut_short.errors)


def test_words_are_logged_if_asked_for(cut_short: Life) -> None:
    said = "".join(cut_short.errors)
    assert re.search(r"^\d{4}-.* INFO octavo\.access: GET '/v1/models' 200 .* id=\w+$", said, re.M)
    assert not any(line.startswith("{") for line in cut_short.errors)


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)],
)
def test_a39_a_second_signal_ends_the_drain_at_once(tiny: Path, first: signal.Signals, second: signal.Signals) -> None:
    """Though a request is open, and though the engine hangs: the drain would last ten times as long as the test."""
    with serving(tiny, "--shutdown-timeout", str(10 * PATIENCE), "--admin-api-key", "adm") as (command, http):
        [engine] = command.children()
        engine.suspend()
        with raw_connection(http) as connection:
            body = json.dumps({"prompt": "hello", "max_tokens": 60, "stream": True}).encode()
            connection.sendall(head("POST", "/v1/completions", len(body)) + body)
            eventually(lambda: http.get("/load", headers={"authorization": "Bearer adm"}).json() == {"server_load": 1})
            command.process.send_signal(first)
            eventually(lambda: http.get("/readyz").json()["phase"] == "draining")
            assert command.process.poll() is None
            command.process.send_signal(second)
            assert command.wait() == 128 + second
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_a39_a_signal_while_the_model_loads_ends_it_without_a_word(tiny: Path) -> None:
    command = Command(str(tiny), "--port", "0")
    try:
        eventually(command.children)
        [engine] = command.children()
        engine.suspend()  # it will not have loaded when the signal comes
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 0
        assert "Traceback" not in "".join(command.errors) and command.lines.empty()
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    finally:
        command.process.kill()


def test_a39_a_body_that_never_comes_is_answered_at_the_end(tiny: Path) -> None:
    """The drain does not wait for a request that has not arrived; its client is told all the same."""
    with serving(tiny) as (command, http), raw_connection(http) as connection:
        connection.sendall(head("POST", "/v1/completions", 1000, Expect="100-continue") + b"{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")  # the route is reading
        command.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert command.wait() == 0
    status_and_headers, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert status_and_headers.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: " in status_and_headers
    assert error["code"] == "engine_not_ready" and "shutting down" in error["message"]


@pytest.fixture(scope="module")
def bereft(tiny: Path) -> Life:
    """Its engine is killed."""
    with serving(tiny) as (command, http):
        [engine] = command.children()
        engine.suspend()  # so that the request is certainly still open
        with http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 400, "stream": True}) as answer:
            engine.kill()
            text = "".join(answer.iter_text())
        assert answer.status_code >= 500 or '"error"' in text
        return Life(command.wait(), command.errors, False, [text])


def test_a07_a_killed_engine_fails_requests_and_ends_the_server(bereft: Life) -> None:
    assert bereft.code == 1
    assert "signal 9" in "".join(bereft.errors)


def test_an_engine_that_dies_logs_json_too(bereft: Life) -> None:
    [said] = [line for line in map(json.loads, bereft.errors) if line["level"] == "error"]
    assert said["logger"] == "octavo.server" and "signal 9" in said["message"]


def test_the_engine_ends_with_a_killed_server(tiny: Path) -> None:
    with serving(tiny) as (command, _):
        [engine] = command.children()
        command.process.kill()
        command.wait()
        engine.wait(PATIENCE)


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
