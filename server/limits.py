"""Bounds on what one connection may make the server hold, checked before anything is built from it."""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from server.errors import HTTPError, Problem

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class HTTPLimits:
    body_bytes: int = 16 * MEBIBYTE
    """Largest request body. A window of a million tokens, escaped, is about half of it."""
    body_seconds: float = 60.0
    """Time a client has to deliver its body."""
    stall_seconds: float = 60.0
    """Time a reader may leave a stream's bytes unread before its request is aborted."""
    report_seconds: float = 5.0
    """Time the engine has to answer GET /debug/kv."""
    inline_size: int = 1024
    """Texts of up to so many characters are tokenised on the event loop; longer ones in a thread, to delay nobody."""
    light_size: int = 1 << 16
    """Texts longer than this wait for one another: `heavy_width` of them are worked on at once."""
    light_width: int = 4
    heavy_width: int = 2
    parse_size: int = 1 << 18
    """Bodies of more bytes are parsed in a thread."""


async def read_body(request: Request, limits: HTTPLimits) -> bytes:
    """The whole body. Raises `HTTPError` 415, 413, 408 or, for a body that is not HTTP, 400; `ClientDisconnect` when
    the client is gone."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"The request body must not be compressed: content-encoding {encoding[:40]!r} is not taken."
        raise HTTPError(Problem(415, message, code="unsupported_content_encoding"))
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits, {})  # the transport drops what the client has yet to send
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body_bytes:
                    raise _too_large(limits, {"connection": "close"})
                chunks.append(chunk)
    except TimeoutError:
        message = f"The request body did not arrive within {limits.body_seconds:g} seconds."
        raise HTTPError(Problem(408, message, code="request_timeout", headers={"connection": "close"})) from None
    problem = request.scope["state"].get("body_problem")  # see http_protocol.py
    if problem is not None:
        raise HTTPError(problem)
    return b"".join(chunks)


async def disconnected(request: Request) -> None:
    """Returns when the client has gone. For requests whose body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(limits: HTTPLimits, headers: dict[str, str]) -> HTTPError:
    message = f"The request body is larger than {limits.body_bytes} bytes."
    return HTTPError(Problem(413, message, code="request_too_large", headers=headers))
