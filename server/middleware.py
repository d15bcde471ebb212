"""The outermost layer: a request id in and out, the last catch of errors, HTTP metrics and the access log.

Plain ASGI: `receive` goes through untouched, so that a disconnect reaches the handler at once.
"""

import asyncio
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import NotReady
from server.auth import PROBES
from server.errors import problem_of
from server.logs import GONE, RequestLog
from server.metrics import Metrics
from server.request_id import request_id_from

logger = logging.getLogger("octavo.server")

_QUIET = PROBES | {"/metrics"}
"""Paths that are asked every few seconds: neither counted nor logged."""
_POLLED = "/debug/kv"
"""The page at / asks it every second: what went well is counted, not logged."""


class RequestContext:
    def __init__(self, app: ASGIApp, metrics: Metrics, log: RequestLog, root_path: str = "") -> None:
        """`root_path`: the path under which a proxy shows us; whoever comes after this layer never sees it."""
        self._app = app
        self._metrics = metrics
        self._log = log
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root_path and scope.get("path", "").startswith(self._root_path + "/"):
            scope["path"] = scope["path"][len(self._root_path) :]
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["path"] == self._root_path:  # the page's own links start from the slash
            return await RedirectResponse(self._root_path + "/")(scope, receive, send)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id_from(Headers(scope=scope).get("x-request-id"))  # a body may bring another
        started, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends, and this request's time is up
            if status == 0:
                ending = NotReady("The server is shutting down and the time for this request has run out.", "draining")
                await problem_of(ending).response()(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", state["request_id"])
            if status == 0:
                await problem_of(error).response()(scope, receive, send_with_id)
        finally:
            self._account(scope, status, time.monotonic() - started)
        return None

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        if scope["path"] in _QUIET:
            return
        # The template, not the path: labels must stay few whatever clients ask for.
        handler = getattr(scope.get("route"), "path", "none")
        if scope["state"].get("given_up"):  # see streaming.py: it began well, and was not read to its end
            status = GONE
        self._metrics.http_request(handler, scope["method"], status, seconds)
        if scope["path"] == _POLLED and status == 200:
            return
        state = scope["state"]
        request = {"id": state["request_id"], "method": scope["method"], "path": scope["path"], "route": handler}
        self._log.write({**request, "status": status, "seconds": seconds}, state.get("engine_id"))
