"""Probes: /health and /livez say whether the process and its engine live, /readyz whether to send requests here."""

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from configs.version import VERSION
from server.context import context_of
from server.errors import DRAINING_RETRY_SECONDS, LOADING_RETRY_SECONDS, Problem, retry_after
from server.exposition import render
from server.openapi import answers, problem
from server.protocol.shapes import Healthy, Unavailable, VersionAnswer

router = APIRouter(tags=["probes"])

HEALTH = answers(Healthy) | {503: problem(503, Unavailable)}
OPENMETRICS = {"application/openmetrics-text": {"schema": {"type": "string"}}}
"""Beside plain text."""

_REASONS = {
    "loading": "The model is still loading.",
    "draining": "The server is shutting down.",
    "dead": "The engine has stopped; the server's log says why.",
    "overloaded": "The queue is full.",
}


@router.get("/health", responses=HEALTH)
@router.get("/live", responses=HEALTH)
@router.get("/livez", responses=HEALTH)
@router.get("/ping", responses=HEALTH)
@router.post("/ping", responses=HEALTH)
async def health(request: Request) -> Response:
    """200 unless the engine is dead. Loading, draining and busy are healthy."""
    phase = context_of(request).phase
    if phase == "dead":
        return _unavailable(Problem(503, _REASONS[phase], code="engine_dead"), phase)
    return _json({"status": "ok", "phase": phase})


@router.get("/ready", responses=HEALTH)
@router.get("/readyz", responses=HEALTH)
async def ready(request: Request) -> Response:
    """200 when requests are welcome, else 503 and why: loading, draining, dead or overloaded."""
    context = context_of(request)
    phase = context.readiness
    if phase == "ready":
        return _json({"status": "ok", "phase": phase})
    seconds = LOADING_RETRY_SECONDS if phase in ("loading", "overloaded") else DRAINING_RETRY_SECONDS
    problem = Problem(503, _REASONS[phase], code="engine_not_ready", headers=retry_after(seconds))
    if phase != "loading":
        return _unavailable(problem, phase)
    loading = context.loading if context.client is None else context.client.loading
    return _unavailable(problem, phase, detail=loading.phase, progress=round(loading.fraction, 3))


def _unavailable(problem: Problem, phase: str, **progress: object) -> Response:
    """The usual envelope for clients, and beside it the same for who reads probes."""
    return _json({"status": "unavailable", "phase": phase, **progress, **problem.body()}, 503, problem.headers)


def _json(body: dict[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Ends its line: probes are read in terminals."""
    return Response(msgspec.json.encode(body) + b"\n", status, headers, "application/json")


@router.get("/version", responses=answers(VersionAnswer))
async def version() -> Response:
    """Octavo's version."""
    return _json({"version": VERSION})


@router.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": OPENMETRICS}})
async def metrics(request: Request) -> Response:
    """Prometheus exposition; OpenMetrics for scrapers that ask for it."""
    body, content_type = render(request.app.state.registry, request.headers.get("accept"))
    return Response(body, headers={"content-type": content_type})
