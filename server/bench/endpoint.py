"""A server with OpenAI's API, over HTTP/1.1: what it serves, and its answers with the time of each chunk."""

import asyncio
import contextlib
import json
import os
import re
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httptools

from configs.errors import SettingsError, StartupError, shown
from server.bench.values import MAX_WORDS, count, error_words, num_tokens, parse, printable, windows_of, words_of

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""A request that hears nothing for so long has failed."""
TOO_LONG = re.compile(r"context.?(length|size|window)", re.IGNORECASE)
"""Stands in the refusal of a prompt that is too long: Octavo, vLLM, SGLang, llama.cpp and OpenAI."""


class RequestError(Exception):
    """One request failed, and why, on one line. `too_long`: its prompt does not fit the server's window."""

    def __init__(self, words: str, status: int | None = None) -> None:
        super().__init__(printable(" ".join(words.split())[:MAX_WORDS])[:MAX_WORDS])
        self.status = status
        self.too_long = status == 400 and TOO_LONG.search(words) is not None


@dataclass
class Answer:
    """Times are seconds after the request was sent on an open connection. Counts are the server's, or None."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    """Of the chunks with text."""
    end: float = 0.0
    """Of the last chunk of the choice: with the last token, whether or not that has text."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    is_whole: bool = False

    def take(self, event: dict[str, Any], now: float) -> None:
        """One event of the stream. Raises `RequestError`; `AttributeError` or `TypeError` if it is of another shape."""
        if event.get("error"):
            raise RequestError(words_of(event))
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        self.prompt_tokens = _latest(usage.get("prompt_tokens"), self.prompt_tokens)
        self.output_tokens = _latest(usage.get("completion_tokens"), self.output_tokens)
        self.cached_tokens = _latest(details.get("cached_tokens"), self.cached_tokens)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            said = delta.get("text") or delta.get("content") or ""
            self.end, self.text = now, self.text + said
            if said or delta.get("reasoning_content") or delta.get("reasoning"):
                self.times.append(now)
            self.is_whole = self.is_whole or choice.get("finish_reason") is not None


class Endpoint:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: with or without a scheme and /v1. Raises `SettingsError`."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            port, parts = None, urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(f"{shown(url)} is not the URL of a server, such as http://127.0.0.1:8000.")
        is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port or (443 if is_https else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if is_https else None
        place = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{place}{self._path}"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {place}\r\nConnection: close\r\nContent-Type: application/json\r\n{key}"
        self.model = ""
        self.window: int | None = None
        """Tokens of a sequence at most, where the server says so."""

    async def find_model(self, wanted: str | None) -> None:
        """Sets `model` and `window` from the server's list of models. Raises `StartupError`."""
        try:
            windows = windows_of(await self._whole("GET", "/v1/models"))
        except RequestError as error:
            raise self._refusal(error) from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StartupError(f"{self.url}/v1/models does not answer as an OpenAI-compatible server does.") from None
        if not windows:
            raise StartupError(f"{self.url} serves no model.")
        if wanted is not None and wanted not in windows:
            raise StartupError(
                f"{self.url} serves no model {wanted!r}, but {', '.join(map(printable, windows))}: see --model."
            )
        self.model = wanted or next(iter(windows))
        self.window = windows[self.model]

    def _refusal(self, error: RequestError) -> StartupError:
        if error.status in (401, 403):
            return StartupError(f"{self.url} refuses the key (HTTP {error.status}): see --api-key.")
        if error.status == 404:
            return StartupError(f"{self.url} has no /v1/models, so it is no OpenAI-compatible server.")
        return StartupError(f"{self.url} does not answer: {str(error).rstrip('.')}.")

    async def count(self, text: str) -> int | None:
        """Its tokens; None where the server has no /tokenize."""
        body = {"model": self.model, "prompt": text, "content": text}  # llama.cpp reads `content`, others `prompt`
        try:
            return num_tokens(await self._whole("POST", "/tokenize", body))
        except (RequestError, ValueError, TypeError, KeyError):
            return None

    async def stream(self, path: str, fields: dict[str, Any]) -> Answer:
        """Asks and reads to the end. Raises `RequestError`."""
        answer, pending = Answer(), b""
        body = {"model": self.model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        async with self._sent("POST", path, body | fields) as response:
            if response.status != 200:
                raise _refused(response.status, b"".join([part async for part in response.parts()]))
            async for part in response.parts():
                now = perf_counter() - response.sent
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        _take(answer, data, now)
        if not answer.is_whole:
            raise RequestError("the stream ended before the answer did")
        if not answer.times:
            raise RequestError("the answer has no text")
        return answer

    async def _whole(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        async with self._sent(method, path, body) as response:
            content = b"".join([part async for part in response.parts()])
        if response.status != 200:
            raise _refused(response.status, content)
        return content

    @contextlib.asynccontextmanager
    async def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator["_Response"]:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except (OSError, UnicodeError) as error:
            raise RequestError(f"no connection: {_reason(error)}") from None
        try:
            response = _Response(reader)
            writer.write(head.encode() + content)
            await response.read_head()
            yield response
        except httptools.HttpParserUpgrade:
            raise RequestError(f"it answers in another protocol than HTTP (HTTP {response.status})") from None
        except httptools.HttpParserError:
            raise RequestError("what it answers is not HTTP") from None
        except OSError as error:
            raise RequestError(f"the connection broke: {_reason(error)}") from None
        finally:
            writer.transport.abort()


class _Response:
    """To a request on its own connection, made right before that is sent."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._parser = reader, httptools.HttpResponseParser(self)
        self._body, self._has_head, self._is_complete, self._has_length = bytearray(), False, False, False
        self.sent = perf_counter()

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    async def read_head(self) -> None:
        while not self._has_head:
            await self._read()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while True:
            if self._body:
                part = bytes(self._body)
                self._body.clear()
                yield part
            elif self._is_complete:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                data = await self._reader.read(2**16)
        except TimeoutError:
            raise RequestError(f"nothing came for {SILENCE_SECONDS:g} s") from None
        if data:
            self._parser.feed_data(data)
        elif self._has_head and not self._has_length:  # such a body ends with the connection
            self._is_complete = True
        else:
            raise RequestError("the server closed the connection before the answer ended")

    # ------------------------------------------------------------------ called by the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._has_head = self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head


def _take(answer: Answer, data: bytes, now: float) -> None:
    try:
        answer.take(parse(data), now)
    except (ValueError, AttributeError, TypeError):
        words = shown(data.decode(errors="replace"))
        raise RequestError(f"the stream has an event of another shape than OpenAI's: {words}") from None


def _latest(said: Any, before: int | None) -> int | None:
    """Some servers count in every event: the last one that does is right. 0 is a count. Raises `RequestError`."""
    try:
        found = count(said)
    except ValueError as error:
        raise RequestError(f"the stream's usage cannot be: {error}") from None
    return before if found is None else found


def _refused(status: int, content: bytes) -> RequestError:
    return RequestError(f"HTTP {status}: {error_words(content)}".rstrip(": \n"), status)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return getattr(error, "verify_message", "") or error.reason or "TLS failed"
    if isinstance(error, TimeoutError):
        return "nobody answers"
    if isinstance(error, OSError) and error.errno is not None:
        return (os.strerror(error.errno) if error.errno > 0 else str(error.strerror)).lower()
    if isinstance(error, ConnectionError):
        return "the other side hung up"
    return "no such host" if isinstance(error, UnicodeError) else "none of the host's addresses answers"
