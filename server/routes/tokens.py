"""POST /tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from engine import InvalidRequest, NotReady
from server import translate
from server.context import context_of
from server.errors import about
from server.limits import read_body
from server.openapi import accepts
from server.protocol.body import parse
from server.protocol.tokens import DetokenizeBody, TokenizeBody
from server.protocol.unsupported import TEMPLATE, refuse

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=accepts(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the model would see it."""
    context = context_of(request)
    client = context.engine()
    body = parse(TokenizeBody, await read_body(request, context.limits))
    context.served_name(body.model)
    if client.info is None:
        raise NotReady("The model is still loading.", "loading")
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", "prompt", "invalid_value")
    if body.prompt is not None:
        with about("prompt"):
            [tokens] = await translate.encoded(context, client, [body.prompt], body.add_special_tokens, None)
    else:
        refuse(body, TEMPLATE)
        with about("messages"):
            tokens = await translate.conversation(context, client, body)
    return {
        "count": len(tokens),
        "max_model_len": client.info.cache.max_model_len,
        "tokens": tokens,
        "token_strs": await translate.token_texts(context, client, tokens) if body.return_token_strs else None,
    }


@router.post("/detokenize", openapi_extra=accepts(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, str]:
    """The text of token ids, control tokens included."""
    context = context_of(request)
    client = context.engine()
    body = parse(DetokenizeBody, await read_body(request, context.limits))
    context.served_name(body.model)
    return {"prompt": await translate.decoded(context, client, body.tokens)}
