"""What comes over the socket before there is a request: slow, endless, oversized and broken (A16, A37)."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import pytest
from kit import MODEL, ScriptedServer, endless
from uvicorn.server import ServerState

from server.http_protocol import BoundedHTTP
from server.limits import MEBIBYTE, HTTPLimits
from server.serving import http_config

pytestmark = pytest.mark.usefixtures("idle_afterwards")
BODY_LIMIT = MEBIBYTE


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    limits = HTTPLimits(body_bytes=BODY_LIMIT, body_seconds=0.5)
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}, limits=limits) as server:
        yield server


def test_a37_endless_chunks(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(server.head("POST", "/v1/completions"))
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(4 * BODY_LIMIT // 0x10000):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has hung up
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_a37_a_slow_client_is_dropped(server: ScriptedServer, bystander: None):
    with server.connect() as connection:
        connection.sendall(server.head("POST", "/v1/completions", 1000) + b'{"prompt"')
        answer = b""
        while received := connection.recv(1 << 16):
            answer += received
    assert answer.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in answer


def test_a37_heads_that_are_too_large(server: ScriptedServer, bystander: None):
    for head in (
        b"GET /health HTTP/1.1\r\nHost: kit\r\nX: " + b"x" * (1 << 20),
        b"GET /health HTTP/1.1\r\nHost: kit\r\n" + b"X: y\r\n" * (1 << 17),
        b"GET /" + b"x" * (1 << 20),
    ):
        with server.connect() as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(head)
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 431 ") and b'"invalid_request_error"' in answer


def test_a37_a_head_that_does_not_come_is_not_waited_for(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedHTTP, "head_seconds", 0.1)
    for beginning in (b"", b"GET /health HTT"):
        with server.connect() as connection:
            connection.sendall(beginning)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ") and connection.recv(1) == b""


def test_a37_ordinary_heads_and_keep_alive_are_untouched(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedHTTP, "head_seconds", 0.2)
    body = json.dumps({"model": MODEL, "prompt": "s1"}).encode().ljust(200_000)
    for _ in range(3):
        response = server.http.post("/v1/completions", content=body, headers={"x-large": "x" * 30_000})
        assert response.status_code == 200
        threading.Event().wait(0.1)  # the connection is idle for longer than a head may take


def test_a16_what_is_not_http_gets_an_envelope_too(server: ScriptedServer):
    for nonsense in (
        b"nonsense\r\n\r\n",
        b"GET /a b c HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ):
        with server.connect() as connection:
            connection.sendall(nonsense)
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


class Recorder(asyncio.Transport):
    """What a protocol writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._closing = b"", False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True


def test_a37_a_whole_head_in_one_read_is_bounded_too(server: ScriptedServer):
    loop = asyncio.new_event_loop()
    try:
        long = b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nX: " + b"y" * 40_000
        for head in (long, b"GET / HTTP/1.1" + b"\r\nX: y" * 20_000):
            config = http_config(server.app, server.settings)
            config.load()
            protocol = BoundedHTTP(config, ServerState(), {}, loop)
            transport = Recorder()
            protocol.connection_made(transport)
            protocol.data_received(head + b"\r\nHost: kit\r\n\r\n")
            protocol.connection_lost(None)
            assert transport.written.startswith(b"HTTP/1.1 431 ") and transport.written.count(b"HTTP/1.1") == 1
            assert protocol.cycle is None
    finally:
        loop.close()


def test_a_stream_for_http_1_0_has_no_chunks(server: ScriptedServer):
    """As nginx asks unless it is told otherwise."""
    body = json.dumps({"prompt": "s1", "max_tokens": 3, "stream": True}).encode()
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head, _, stream = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and b"connection: close" in head
    assert b"transfer-encoding" not in head and b"content-length" not in head
    frames = stream.split(b"\n\n")
    assert all(frame.startswith(b"data: ") for frame in frames[:-1]) and frames[-2:] == [b"data: [DONE]", b""]


def test_http_1_0_has_lengths_where_they_are_known(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head and json.loads(body)["status"] == "ok"
