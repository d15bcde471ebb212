"""What operators may do to a running server, with the admin key: end requests, empty the cache, look."""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.settings import SECRET_FIELDS
from configs.version import VERSION
from server.auth import admin_only
from server.context import context_of
from server.limits import read_body
from server.openapi import READING, accepts, answers
from server.protocol.body import Body, parse
from server.protocol.shapes import Aborted, Evicted, ServerInfo, ServerLoad

router = APIRouter(tags=["control"], dependencies=[Depends(admin_only)])


class AbortBody(Body):
    """POST /abort_requests."""

    request_ids: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]
    """As in the answers' `x-request-id`, or the answers' ids."""


@router.post("/abort_requests", openapi_extra=accepts(AbortBody), responses=answers(Aborted, *READING, 401, 403, 503))
async def abort_requests(request: Request) -> Response:
    """Ends open requests: their clients get an error. Ids that are not open are counted as none."""
    context = context_of(request)
    client = context.engine()
    body = parse(AbortBody, await read_body(request, context.limits))
    aborted = 0
    for request_id in body.request_ids:
        bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        aborted += client.abort_request(request_id) or client.abort_request(bare)
    return JSONResponse({"aborted_sequences": aborted})


@router.post("/reset_prefix_cache", responses=answers(Evicted, 401, 403, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Gives up all cached pages that no running request uses."""
    return JSONResponse({"evicted_pages": await context_of(request).engine().reset_prefix_cache()})


@router.get("/load", responses=answers(ServerLoad, 401, 403, 503))
async def load(request: Request) -> Response:
    """Sequences that run or wait."""
    return JSONResponse({"server_load": context_of(request).engine().num_open})


@router.get("/server_info", responses=answers(ServerInfo, 401, 403, 503))
async def server_info(request: Request) -> Response:
    """Version, settings (keys left out), and what the engine made of them."""
    context = context_of(request)
    client = context.engine()
    summary = client.info.summary if client.info is not None else {}
    return JSONResponse(
        {
            "version": VERSION,
            "phase": context.phase,
            "models": list(client.model.names),
            "engine": summary,
            "settings": context.settings.model_dump(mode="json", exclude=set(SECRET_FIELDS)),
        }
    )
