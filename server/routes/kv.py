"""GET /debug/kv: where the pages are, what was counted, and the latest events with their reasons.

For people and for the page at /. Every number stands there once. docs/api.md says what each means.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from engine import EngineReady, NotReady, Stats
from server.context import caller_of, context_of
from server.errors import DRAINING_RETRY_SECONDS, HTTPError, Problem, retry_after
from server.openapi import answers
from server.protocol.shapes import CacheShape, KVShape

router = APIRouter(tags=["kv"])

MAX_EVENTS = 1000
NO_COUNTERS = ("pages_total", "received_total")
"""A gauge that `memory_stats()` has, and bookkeeping between the processes."""
COUNTERS = [name for name in Stats.__struct_fields__ if name.endswith("_total") and name not in NO_COUNTERS]


@router.get("/debug/kv", responses=answers(KVShape, 400, 503))
async def kv(request: Request, events: Annotated[int, Query(ge=0, le=MAX_EVENTS)] = 200) -> Response:
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
    figures = {"model": client.model.name, **report.memory, **_more(client.stats, client.info)}
    return Response(_written_for_people(figures, report.events), media_type="application/json")


def _more(stats: Stats, info: EngineReady) -> dict[str, Any]:
    """What `memory_stats()` does not say."""
    return {
        "shared_pages": stats.pages_shared,
        "stored_tokens": stats.tokens_stored,
        "window_utilization": stats.window_usage,
        "waiting_requests": stats.waiting,
        "waiting_tokens": stats.waiting_tokens,
        "step_tokens": stats.scheduled_tokens,
        "cache": {name: getattr(info.cache, name) for name in CacheShape.model_fields},
        "counters": {name: getattr(stats, name) for name in COUNTERS},
    }


def _written_for_people(figures: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> bytes:
    """Indented JSON, but an event a line."""
    head = msgspec.json.format(msgspec.json.encode(figures), indent=2).removesuffix(b"\n}")
    lines = b",".join(b"\n    " + msgspec.json.encode(event) for event in events)
    return head + b',\n  "events": [' + lines + (b"\n  ]" if events else b"]") + b"\n}\n"
