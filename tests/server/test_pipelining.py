"""Requests on one connection that do not wait for one another, and offers of another protocol."""

import json
import socket
from collections.abc import Iterator

import pytest
from kit import MODEL, ScriptedServer, endless, eventually, receive_until

pytestmark = pytest.mark.usefixtures("idle_afterwards")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}, max_num_seqs=1) as server:
        yield server


def request(server: ScriptedServer, prompt: str, **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 400, **fields}).encode()
    return server.head("POST", "/v1/completions", len(body)) + body


def nexts(server: ScriptedServer) -> dict[str, bytes]:
    return {
        "a small one": server.head("GET", "/health", 0),
        "half a head": b"GET /he",
        "the same": request(server, "long"),
        "several": server.head("GET", "/health", 0) * 8,
        "a long body": request(server, "s1 " + "x" * 200_000),
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("then", ["a small one", "half a head", "the same", "several", "a long body"])
def test_whoever_leaves_ends_the_work_whatever_else_was_sent(server: ScriptedServer, then: str, stream: bool):
    server.executor.hold()
    with server.connect() as connection:
        connection.sendall(request(server, "long", stream=stream) + nexts(server)[then])
        eventually(lambda: server.context.client.num_open == 1)
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)


def test_a_stream_that_still_waits_ends_too(server: ScriptedServer):
    server.executor.hold()
    with server.open_request("long", stream=True) as first:
        eventually(lambda: server.context.client.num_open == 1)
        with server.connect() as connection:
            connection.sendall(request(server, "long", stream=True) + server.head("GET", "/health", 0))
            eventually(lambda: server.context.client.num_open == 2)
        eventually(lambda: server.context.client.num_open == 1)
        first.close()
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)


def test_pipelined_requests_are_answered_in_order(server: ScriptedServer):
    bodies = [request(server, "s1", max_tokens=count) for count in (1, 2, 3)]
    long = request(server, "s1 " + "x" * 100_000)
    with server.connect() as connection:
        connection.sendall(b"".join(bodies) + long + server.head("GET", "/version", 0))
        received = receive_until(connection, b'"version"')
    places = [received.index(b'"text":"%b"' % text) for text in (b"A", b"AB", b"ABC")]
    assert places == sorted(places)
    assert received.count(b"HTTP/1.1 200") == 4 and received.count(b"HTTP/1.1 400") == 1


# ---------------------------------------------------------------------- upgrades
OFFER = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABk"}


@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_an_offer_of_another_protocol_is_ignored(server: ScriptedServer, pieces: int):
    """Java's HttpClient makes it with every first request (RFC 9110, section 7.8)."""
    body = json.dumps({"model": MODEL, "prompt": "s1", "max_tokens": 2}).encode()
    raw = server.head("POST", "/v1/completions", len(body), **OFFER) + body
    size = -(-len(raw) // pieces)
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):  # and the connection goes on
            for start in range(0, len(raw), size):
                connection.sendall(raw[start : start + size])
            received = receive_until(connection, b'"AB"')
            assert received.startswith(b"HTTP/1.1 200")


def test_offers_in_chunks_and_in_a_row(server: ScriptedServer):
    body = json.dumps({"model": MODEL, "prompt": "s1", "max_tokens": 3}).encode()
    chunked = server.head("POST", "/v1/completions", **OFFER) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    get = server.head("GET", "/version", 0, Connection="Upgrade", Upgrade="websocket")
    with server.connect() as connection:
        connection.sendall(get + chunked + get)
        received = receive_until(connection, b'"ABC"')
        received += receive_until(connection, b'"version"') if received.count(b'"version"') < 2 else b""
    assert received.count(b"HTTP/1.1 200") == 3


def test_connect_is_no_request_here(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(b"CONNECT kit:80 HTTP/1.1\r\nHost: kit:80\r\n\r\n")
        assert receive_until(connection, b"}").startswith(b"HTTP/1.1 4")
