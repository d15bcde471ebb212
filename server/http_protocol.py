"""uvicorn's HTTP protocol with what it lacks: a bound on a request's head, in bytes and seconds, and our error envelope
and request id for what is not HTTP.

A bad head never becomes a request: it is answered here, once the answers before it are out, and the connection closes.
A bad body belongs to a request that may be under way: `read_body` is told, and the answer comes the usual way.
"""

import asyncio
import socket
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import Problem
from server.middleware import access, request_id_from

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
INVALID = Problem(400, "This is not a valid HTTP request.", code="invalid_http")
INVALID_BODY = Problem(400, "The request body breaks off: its chunks are not valid HTTP.", code="invalid_http")
TOO_LARGE = Problem(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")


class BoundedHTTP(HttpToolsProtocol):
    """A head is open from the connection's start, or a request's first byte, until its last header."""

    head_seconds = HEAD_SECONDS
    _timer: asyncio.TimerHandle
    _in_body = False
    _is_broken = False
    """The parser has lost its way: what still comes means nothing."""
    _last_answer = b""
    """Waits for the answers before it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio leaves Nagle's algorithm on where the listener did not name its protocol: what follows a first
            # piece, a body or a token, would wait for the client's delayed acknowledgement, 40 ms.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        was_open = self._is_open
        super().data_received(data)
        if was_open and self._is_open:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        self._timer.cancel()
        self._open_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._timer.cancel()
        super().on_headers_complete()
        self._is_open, self._in_body = False, True

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._send_last_answer()

    def send_400_response(self, msg: str) -> None:
        is_too_large = self._parsed_bytes > MAX_HEAD_BYTES
        if self._in_body:
            self._break_body(TOO_LARGE if is_too_large else INVALID_BODY)
        else:
            self._refuse(TOO_LARGE if is_too_large else INVALID)

    def _count(self, size: int) -> None:
        """What the parser has seen of this head, however it arrived. Raising stops the parser."""
        self._parsed_bytes += size
        if self._parsed_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")

    def _open_head(self) -> None:
        self._is_open, self._head_bytes, self._parsed_bytes = True, 0, 0
        self._timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _give_up(self) -> None:
        self._refuse(Problem(408, f"The request's head did not arrive within {self.head_seconds:g} seconds."))

    def _break_body(self, problem: Problem) -> None:
        """The body ends here, and so does the connection after the answer."""
        self._is_broken = True
        cycle = self.cycle
        if cycle.response_complete:
            self.transport.close()
            return
        cycle.scope["state"]["body_problem"] = problem
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()

    def _refuse(self, problem: Problem) -> None:
        """Answers when nothing else is under way, and closes."""
        if self._is_broken or self.transport.is_closing():
            return
        self._is_broken = True
        sent = dict(self.headers or ()).get(b"x-request-id", b"") if self._is_open else b""
        request_id = request_id_from(sent.decode("latin-1"))
        access.info("- - %d 0.000s id=%s", problem.status, request_id)
        body = msgspec.json.encode(problem.body())
        head = (
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._last_answer = head.encode() + body
        self._send_last_answer()

    def _send_last_answer(self) -> None:
        if self._last_answer and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(self._last_answer)
            self.transport.close()
