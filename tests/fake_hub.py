"""A Hugging Face Hub on this machine: real HTTP, as far as the real client asks for it.

    with FakeHub({"org/model": Repository({"config.json": b"{}"})}).running() as hub:
        … HF_ENDPOINT=hub.endpoint …

Served are /api/models/REPO[/revision/REV], /api/models/REPO/tree/REV and /REPO/resolve/REV/FILE with ETag and Range.
"""

import hashlib
import http.server
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

COMMIT = "c" * 40
OTHER_COMMIT = "d" * 40
TOKEN = "hf_of_somebody_with_access"


@dataclass
class Repository:
    files: Mapping[str, bytes]
    revisions: Mapping[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    """Its files are for `TOKEN` alone; that it exists, everybody may see."""
    private: bool = False
    breaks: dict[str, list[int]] = field(default_factory=dict)
    """File -> after how many bytes each of its next connections breaks."""
    resets: bool = False
    """Connections break by a reset, not by an end."""
    claims: dict[str, int] = field(default_factory=dict)
    """File -> its size, as the Hub says."""


@dataclass
class FakeHub:
    repositories: dict[str, Repository]
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range) of each request for a file's bytes."""
    endpoint: str = ""
    status: int | None = None
    """Answer everything with this."""

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        hub = self

        class Handler(_Handler):
            served = hub

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda *arguments: None  # type: ignore[method-assign]  # connections broken on purpose
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def fetched(self) -> list[str]:
        """Names of files whose bytes went out, each once."""
        return sorted({path.rpartition("/")[2] for method, path, _ in self.seen if method == "GET"})


class _Handler(http.server.BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(*self._look_up(), body=True)

    def do_HEAD(self) -> None:
        self._answer(*self._look_up(), body=False)

    def _look_up(self) -> tuple[int, bytes, dict[str, str]]:
        path = unquote(self.path.split("?")[0])
        if self.served.status is not None:
            return self.served.status, b"{}", {}
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/(.+))?", path):
            return self._describe(match[1], match[2] == "tree", match[3] or "main")
        match = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path)
        assert match, path
        return self._file(match[1], match[2], match[3])

    def _token(self) -> str:
        return (self.headers.get("authorization") or "").removeprefix("Bearer ")

    def _repository(self, name: str, revision: str) -> tuple[Repository, str] | tuple[int, bytes, dict[str, str]]:
        if self._token() not in ("", TOKEN, "hf_of_somebody_else"):
            return 401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"}
        repository = self.served.repositories.get(name)
        if repository is None or (repository.private and self._token() != TOKEN):
            return 404 if self._token() else 401, b"{}", {"X-Error-Code": "RepoNotFound"}
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.revisions.values():
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        return repository, commit

    def _describe(self, name: str, is_tree: bool, revision: str) -> tuple[int, bytes, dict[str, str]]:
        found = self._repository(name, revision)
        if not isinstance(found[0], Repository):
            return found  # type: ignore[return-value]
        repository, commit = found[0], found[1]
        sizes = {file: repository.claims.get(file, len(data)) for file, data in repository.files.items()}
        answer: Any
        if is_tree:
            answer = [{"type": "file", "path": file, "size": size, "oid": _sha(file)} for file, size in sizes.items()]
        else:
            siblings = [{"rfilename": file, "size": size, "blobId": _sha(file)} for file, size in sizes.items()]
            answer = {"_id": "1", "id": name, "sha": commit, "siblings": siblings}
        return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def _file(self, name: str, revision: str, file: str) -> tuple[int, bytes, dict[str, str]]:
        found = self._repository(name, revision)
        if not isinstance(found[0], Repository):
            return found  # type: ignore[return-value]
        repository, commit = found[0], found[1]
        if repository.gated and self._token() != TOKEN:
            return 403 if self._token() else 401, b"{}", {"X-Error-Code": "GatedRepo"}
        if file not in repository.files:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        self.served.seen.append((self.command, self.path, self.headers.get("range")))
        data = repository.files[file]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if self.command == "GET" and (found_range := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")):
            start = int(found_range[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return 206, data[start:], headers
        return 200, data, headers

    def _answer(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        match = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", unquote(self.path))
        repository = self.served.repositories.get(match[1]) if match else None
        breaks = repository.breaks.get(match[2], []) if match and repository else []
        if breaks:
            self.wfile.write(data[: breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            if repository and repository.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            return
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


def _sha(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
