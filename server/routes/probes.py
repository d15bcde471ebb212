"""Probes: /health and /livez say whether the process and its engine live, /readyz whether to send requests here."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from configs.version import VERSION
from server.context import context_of
from server.errors import DRAINING_RETRY_SECONDS, LOADING_RETRY_SECONDS, Problem, retry_after
from server.exposition import render

router = APIRouter(tags=["probes"])

_REASONS = {
    "loading": "The model is still loading.",
    "draining": "The server is shutting down.",
    "dead": "The engine has stopped.",
    "overloaded": "The queue is full.",
}


@router.head("/health", include_in_schema=False)
@router.head("/live", include_in_schema=False)
@router.head("/livez", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/health")
@router.get("/live")
@router.get("/livez")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 unless the engine is dead. Loading, draining and busy are healthy."""
    context = context_of(request)
    if context.phase != "dead":
        return Response(status_code=200)
    return Problem(503, _REASONS["dead"], code="engine_dead").response()


@router.head("/ready", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/ready")
@router.get("/readyz")
async def ready(request: Request) -> Response:
    """200 when requests are welcome, else 503 and why: loading, draining, dead or overloaded."""
    context = context_of(request)
    state = context.readiness
    loading = context.loading if context.client is None else context.client.loading
    body: dict[str, object] = {"status": state, "phase": state}
    if state == "loading":
        body |= {"detail": loading.phase, "progress": round(loading.fraction, 3)}
    if state == "ready":
        return Response(msgspec.json.encode(body), media_type="application/json")
    seconds = LOADING_RETRY_SECONDS if state in ("loading", "overloaded") else DRAINING_RETRY_SECONDS
    problem = Problem(503, _REASONS[state], code="engine_not_ready", headers=retry_after(seconds))
    return Response(msgspec.json.encode({**problem.body(), **body}), 503, problem.headers, "application/json")


@router.get("/version")
async def version() -> dict[str, str]:
    """Octavo's version."""
    return {"version": VERSION}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus exposition; OpenMetrics for scrapers that ask for it."""
    body, content_type = render(request.app.state.registry, request.headers.get("accept"))
    return Response(body, headers={"content-type": content_type})
