"""uvicorn's HTTP protocol with what it lacks: a bound on a request's head, in bytes and seconds, and our error envelope
for what never becomes a request."""

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import Problem

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
INVALID = Problem(400, "This is not a valid HTTP request.", code="invalid_http")
TOO_LARGE = Problem(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")


class BoundedHTTP(HttpToolsProtocol):
    """A head is open from the connection's start, or a request's first byte, until its last header."""

    head_seconds = HEAD_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
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
        self._is_open = False
        self._timer.cancel()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        is_too_large = self._parsed_bytes > MAX_HEAD_BYTES
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

    def _refuse(self, problem: Problem) -> None:
        """Answers, unless another request's answer is under way, and closes."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = msgspec.json.encode(problem.body())
            head = (
                f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
