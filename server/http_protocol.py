"""uvicorn's HTTP protocol with what it lacks: a bound on a request's head, in bytes and seconds, our error envelope and
request id for what is not HTTP, an eye on the connection's end while requests wait for one another, upgrades that are
ignored, not stumbled over, answers that arrive although the client is still sending, and streams for HTTP/1.0.

A bad head never becomes a request: it is answered here, once the answers before it are out, and the connection closes.
A bad body belongs to a request that may be under way: `read_body` is told, and the answer comes the usual way.
"""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import Problem
from server.logs import access
from server.request_id import request_id_from

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
MAX_PIPELINED = 16
MAX_PIPELINED_BYTES = 1 << 20
"""Of requests that wait for the answers before theirs. What is more stays unread, and with it the connection's end."""
LINGER_SECONDS = 30.0
"""How long a connection that was answered early may go on sending what nobody reads."""
TLS_LINGER_SECONDS = 2.0
"""Under TLS both directions close together: a client that reads to the end waits so long for it."""
INVALID = Problem(400, "This is not a valid HTTP request.", code="invalid_http")
INVALID_BODY = Problem(400, "The request body breaks off: its chunks are not valid HTTP.", code="invalid_http")
TOO_LARGE = Problem(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")


class LingeringTransport:
    """A transport that closes its own direction first where the client is still sending (RFC 9112, section 9.6): closed
    at once, the system would answer what comes next with a reset, and the client would lose our answer."""

    def __init__(self, transport: asyncio.Transport, protocol: "BoundedHTTP") -> None:
        self._transport, self._protocol = transport, protocol
        self._lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        """The second time at once."""
        has_directions = self._transport.can_write_eof()
        if self._lingers or not self._protocol.begin_lingering(has_directions):
            self._transport.close()
            return
        self._lingers = True
        if has_directions:
            self._transport.write_eof()
        self._transport.resume_reading()


class BoundedHTTP(HttpToolsProtocol):
    """A head is open from the connection's start, or a request's first byte, until its last header."""

    head_seconds = HEAD_SECONDS
    linger_seconds = LINGER_SECONDS
    _timer: asyncio.TimerHandle
    _in_body = False
    _is_broken = False
    """The parser has lost its way: what still comes means nothing."""
    _last_answer = b""
    """Waits for the answers before it."""
    _answering: RequestResponseCycle | None = None
    """The request that is being answered, while those that came after it wait in `pipeline`."""
    _offers_upgrade = False
    """The head just read belongs to a request that asks for another protocol."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self))  # type: ignore[arg-type]
        self.access_log = False  # uvicorn's line holds the query, and whatever clients write there; ours is another
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio leaves Nagle's algorithm on where the listener did not name its protocol: what follows a first
            # piece, a body or a token, would wait for the client's delayed acknowledgement, 40 ms.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
        for cycle in (self._answering, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def begin_lingering(self, has_directions: bool) -> bool:
        """Whether the client may still be sending. If so, nothing of it is heeded any more, and not for long."""
        if (not self._in_body and not self._is_broken) or self.transport.is_closing():
            return False
        self._is_broken = True
        self._timer.cancel()
        seconds = self.linger_seconds if has_directions else TLS_LINGER_SECONDS
        self._timer = self.loop.call_later(seconds, self.transport.close)
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        was_open = self._is_open
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if was_open and self._is_open:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        """An offer to change protocols is ignored (RFC 9110, section 7.8), but the parser stops there, before the body:
        another one begins again, with a head that has no such offer."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self._offers_upgrade:
                    return
                self._offers_upgrade = False
                data = self._head_without_upgrade() + data[stop.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        fields = b"".join(b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, fields)

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
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers_upgrade = True
            return
        super().on_headers_complete()
        self._is_open, self._in_body = False, True
        self._read_on()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._read_on()

    def _read_on(self) -> None:
        """Requests that wait must not hide that the client has gone."""
        held = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if 0 < len(self.pipeline) <= MAX_PIPELINED and held <= MAX_PIPELINED_BYTES:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        cycle.scope["state"]["abort"] = self.transport.abort
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
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
        fields = {"id": request_id, "status": problem.status}
        access.info("- - %d 0.000s id=%s", problem.status, request_id, extra={"fields": fields})
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


def _unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """HTTP/1.0 knows no chunks: an answer of unknown length ends with its connection (RFC 9112, section 6.1)."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_plain(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
