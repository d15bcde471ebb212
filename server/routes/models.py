"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.context import ServerContext, context_of
from server.openapi import answers
from server.protocol.shapes import ModelCard, ModelList

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models", response_model=None, responses=answers(ModelList, 503))
async def list_models(request: Request) -> dict[str, Any]:
    """The served model, under each of its names."""
    context = context_of(request)
    return {"object": "list", "data": [_card(context, name) for name in context.engine().model.names]}


@router.get("/models/{model:path}", response_model=None, responses=answers(ModelCard, 404, 503))
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """One model; ids may hold slashes."""
    context = context_of(request)
    return _card(context, context.served_name(model))


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    client = context.engine()
    window = client.info.cache.max_model_len if client.info else None
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": client.model.name,
        "parent": None,
        "max_model_len": window,
    }
