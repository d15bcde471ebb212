"""POST /tokenize and /detokenize."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import EngineClient, InvalidRequest, NotReady
from server import translate
from server.context import ServerContext, context_of
from server.errors import about
from server.intake import body_of, while_wanted
from server.openapi import READING, accepts, answers
from server.protocol.shapes import Detokenized, Tokenized
from server.protocol.tokens import DetokenizeBody, TokenizeBody
from server.protocol.unsupported import TEMPLATE, refuse

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=accepts(TokenizeBody), responses=answers(Tokenized, *READING, 404, 503))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model would see it."""
    context = context_of(request)
    client = context.engine()
    body = await body_of(request, context, TokenizeBody)
    context.served_name(body.model)
    if client.info is None:
        raise NotReady("The model is still loading.", "loading")
    tokens, texts = await while_wanted(request, context, body, _tokenized(context, client, body))
    window = client.info.cache.max_model_len
    return _json({"count": len(tokens), "max_model_len": window, "tokens": tokens, "token_strs": texts})


async def _tokenized(
    context: ServerContext, client: EngineClient, body: TokenizeBody
) -> tuple[list[int], list[str] | None]:
    """Ids and, if asked for, each token's text."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", "prompt", "invalid_value")
    if body.prompt is not None:
        with about("prompt"):
            [tokens] = await translate.encoded(context, client, [body.prompt], body.add_special_tokens, must_fit=False)
    else:
        refuse(body, TEMPLATE)
        with about("messages"):
            tokens = await translate.conversation(context, client, body)
    return tokens, await translate.token_texts(context, client, tokens) if body.return_token_strs else None


@router.post("/detokenize", openapi_extra=accepts(DetokenizeBody), responses=answers(Detokenized, *READING, 404, 503))
async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens included."""
    context = context_of(request)
    client = context.engine()
    body = await body_of(request, context, DetokenizeBody)
    context.served_name(body.model)
    text = await while_wanted(request, context, body, translate.decoded(context, client, body.tokens))
    return _json({"prompt": text})


def _json(answer: dict[str, object]) -> Response:
    """Lists may be long: FastAPI would go through them item by item."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
