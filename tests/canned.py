"""Servers that answer in ways of which the real one is not capable."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[str, dict[str, Any]], bytes]
"""(path, body) -> all bytes of an answer; the connection is closed afterwards."""


@dataclass
class Canned:
    url: str
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(path, body), in the order they came."""
    keys: list[str | None] = field(default_factory=list)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body in self.asked if asked == path]


@contextmanager
def canned(answer: Answer) -> Iterator[Canned]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            first = self.rfile.readline()
            line = first.decode("latin-1").split()
            if not first.endswith(b"HTTP/1.1\r\n"):
                self.wfile.write(b"what?\n")
                return
            headers = dict(head.decode().lower().strip().split(": ", 1) for head in iter(self.rfile.readline, b"\r\n"))
            body = self.rfile.read(int(headers.get("content-length", 0)))
            seen.asked.append((line[1], json.loads(body or b"{}")))
            seen.keys.append(headers.get("authorization"))
            self.wfile.write(answer(line[1], json.loads(body or b"{}")))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 64

    with Server(("127.0.0.1", 0), Handler) as server:
        seen = Canned(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield seen
        server.shutdown()
        thread.join()


def reply(content: Any, status: int = 200) -> bytes:
    """JSON, or text as it is."""
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    return f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def streamed(*events: Any, framed: bool = True, ends: bool = True) -> bytes:
    """SSE. framed: in chunks, else to the end of the connection. ends: with the last chunk."""
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events]
    if not framed:
        return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(lines)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n" * ends


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def models(*names: str, **fields: Any) -> bytes:
    return reply({"object": "list", "data": [{"id": name, **fields} for name in names]})
