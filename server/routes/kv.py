"""GET /debug/kv: where the pages are, and the latest events with their reasons."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request

from engine import NotReady
from server.context import caller_of, context_of
from server.errors import DRAINING_RETRY_SECONDS, HTTPError, Problem, retry_after

router = APIRouter(tags=["kv"])

MAX_EVENTS = 1000


@router.get("/debug/kv")
async def kv(request: Request, events: Annotated[int, Query(ge=0, le=MAX_EVENTS)] = 200) -> dict[str, Any]:
    """The figures of `LLM.memory_stats()`, the engine's latest snapshot, and events, newest last. What events tell of
    other API keys' requests holds no text."""
    context = context_of(request)
    client = context.engine()
    if client.info is None:
        raise NotReady("The model is still loading.", "loading")
    seconds = context.limits.report_seconds
    try:
        async with asyncio.timeout(seconds):
            report = await client.kv_report(events, caller_of(request).tenant)
    except TimeoutError:
        message = f"The engine has not answered within {seconds:g} seconds."
        headers = retry_after(DRAINING_RETRY_SECONDS)
        raise HTTPError(Problem(503, message, code="engine_not_ready", headers=headers)) from None
    return {
        **report.memory,
        "model": client.model.name,
        "cache": msgspec.to_builtins(client.info.cache),
        "stats": {name: getattr(client.stats, name) for name in client.stats.__struct_fields__},
        "events": report.events,
    }
