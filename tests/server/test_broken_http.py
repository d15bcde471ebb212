"""What is no HTTP gets OpenAI's error envelope and a request id wherever an answer can still be read (A16, A37)."""

import json
import logging
import socket
import time
from collections.abc import Iterator

import pytest
from kit import MODEL, PATIENCE, ScriptedServer, endless, eventually, receive_until

from server.http_protocol import BoundedHTTP

pytestmark = pytest.mark.usefixtures("idle_afterwards")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}, log_level="info") as server:
        yield server


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while chunk := connection.recv(1 << 16):
        received += chunk
    return received


def answers(raw: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """(status, headers, body) of responses that carry a content-length."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers["content-length"])
        found.append((int(status.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return found


def assert_refused(answer: tuple[int, dict[str, str], bytes], status: int, code: str | None, request_id: str = ""):
    got, headers, body = answer
    error = json.loads(body)["error"]
    assert got == status and error["code"] == code and error["type"] == "invalid_request_error" and error["message"]
    assert headers["connection"] == "close"
    sent = headers["x-request-id"]
    assert sent == request_id if request_id else len(sent) == 32


NONSENSE = [b"nonsense\r\n\r\n", b"GET /a b c HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /\xff HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize("raw", NONSENSE)
def test_a16_what_is_not_http_has_a_request_id(server: ScriptedServer, raw: bytes, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "octavo.access"), server.connect() as connection:
        connection.sendall(raw)
        [answer] = answers(read_all(connection))
    assert_refused(answer, 400, "invalid_http")
    assert any(answer[1]["x-request-id"] in record.getMessage() for record in caplog.records), "the log has it too"


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [(b"Host: kit\r\nBad Header: x\r\n\r\n", 400, "invalid_http"), (b"X: " + b"x" * 70_000, 431, None)],
    ids=["bad header", "large head"],
)
@pytest.mark.parametrize(("sent", "answered"), [("mine-1", "mine-1"), ("a b", "")])
def test_the_clients_own_id_is_kept_where_it_was_read(
    server: ScriptedServer, line: bytes, status: int, code: str | None, sent: str, answered: str
):
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Request-Id: %s\r\n%s" % (sent.encode(), line))
        answer = answers(receive_until(connection, b"}}"))[0]
    assert_refused(answer, status, code, answered)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("rest", [b"zz\r\n", b"1\r\n{}}\r\n", b"-1\r\n\r\n", b"0\r\nBad Trailer: x\r\n\r\n"])
def test_a_bad_chunk_is_an_answer_to_its_request(server: ScriptedServer, path: str, rest: bytes):
    before = server.metric("octavo_requests_finished_total", reason="rejected")
    with server.connect() as connection:
        connection.sendall(server.head("POST", path, **{"X-Request-Id": "mine-2"}) + b"1\r\n{\r\n" + rest)
        [answer] = answers(read_all(connection))
    assert_refused(answer, 400, "invalid_http", "mine-2")
    counted = server.metric("octavo_requests_finished_total", reason="rejected") - before
    assert counted == path.startswith("/v1/")
    assert server.metric("octavo_client_disconnects_total") == 0


def test_a_bad_chunk_that_comes_later(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(server.head("POST", "/v1/completions", Expect="100-continue") + b"1\r\n{\r\n")
        receive_until(connection, b"100 Continue\r\n\r\n")  # the application waits for the body
        connection.sendall(b"nonsense\r\n")
        [answer] = answers(read_all(connection))
    assert_refused(answer, 400, "invalid_http")


def test_a_trailer_may_not_be_endless(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(
            server.head("POST", "/v1/completions") + b"1\r\n{\r\n0\r\nX: " + b"x" * 70_000 + b"\r\nY: z\r\n"
        )
        answer = answers(receive_until(connection, b"}}"))[0]
    assert_refused(answer, 431, None)


def test_a_bad_chunk_after_the_answer_closes_the_connection(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(server.head("POST", "/v1/nothing") + b"1\r\n{\r\n")
        first = receive_until(connection, b"}}")
        connection.sendall(b"zz\r\n")
        assert read_all(connection) == b""
    [answer] = answers(first)
    assert answer[0] == 404


def test_nonsense_after_a_request_waits_for_its_answer(server: ScriptedServer):
    body = json.dumps({"model": MODEL, "prompt": "s1"}).encode()
    request = server.head("POST", "/v1/completions", len(body)) + body
    server.executor.hold()
    with server.connect() as connection:
        connection.sendall(request + request + b"nonsense\r\n\r\n" + request)
        eventually(lambda: server.context.client.num_open == 1)
        server.executor.allow(None)
        first, second, last = answers(read_all(connection))
    for status, _, text in (first, second):
        assert status == 200 and json.loads(text)["choices"][0]["text"] == "ABCDEFGHIJKL"
    assert_refused(last, 400, "invalid_http")


def test_nonsense_after_an_answer(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(server.head("GET", "/version", 0))
        receive_until(connection, b"}")
        connection.sendall(b"\x16\x03\x01\x02\x00")
        [answer] = answers(read_all(connection))
    assert_refused(answer, 400, "invalid_http")


def test_whoever_leaves_after_nonsense_ends_the_work(server: ScriptedServer):
    server.executor.hold()
    with server.open_request("long", stream=True) as connection:
        eventually(lambda: server.context.client.num_open == 1)
        connection.sendall(b"nonsense\r\n\r\n")
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)


def test_nothing_waits_for_the_clients_acknowledgement(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    """Nagle's algorithm would hold back an answer's body, and every token of a stream, for 40 ms."""
    seen = []
    on_url = BoundedHTTP.on_url

    def spy(protocol: BoundedHTTP, url: bytes) -> None:
        connection = protocol.transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        on_url(protocol, url)

    monkeypatch.setattr(BoundedHTTP, "on_url", spy)
    with server.connect() as connection:
        connection.sendall(server.head("GET", "/version", 0))
        receive_until(connection, b"}")
    assert len(seen) == 1 and seen[0] != 0


# ---------------------------------------------------------------------- answers to clients that are still sending
TOO_LARGE_BODY = 17 << 20


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: kit\r\nConnection: close\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n",
        b"POST /nothing HTTP/1.0\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: kit\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n",
        b"nonsense %d ",
    ],
    ids=["close", "HTTP/1.0", "unknown route", "chunked", "no HTTP"],
)
def test_a_refusal_reaches_a_client_that_is_still_sending(server: ScriptedServer, head: bytes):
    """One that sends all it has before it reads."""
    with server.connect() as connection:
        connection.sendall(head % TOO_LARGE_BODY + b"x" * TOO_LARGE_BODY)
        [(status, headers, body)] = answers(read_all(connection))
    assert status in (400, 404, 413) and headers["connection"] == "close" and json.loads(body)["error"]["message"]


def test_who_never_stops_sending_is_cut_off(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedHTTP, "linger_seconds", 0.2)
    with server.connect() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert answers(read_all(connection))[0][0] == 400
        deadline = time.monotonic() + PATIENCE
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() < deadline:
                connection.sendall(b"x" * 1000)
