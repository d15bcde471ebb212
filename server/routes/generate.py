"""POST /v1/chat/completions and /v1/completions: one path for both, streamed or whole."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine import EngineClient
from server import translate
from server.context import ServerContext, context_of
from server.errors import about
from server.generation import Generation, Work, collect
from server.intake import body_of, while_wanted
from server.logs import GONE
from server.openapi import READING, accepts, answers
from server.protocol.answer import Answer
from server.protocol.chat import ChatBody
from server.protocol.completion import CompletionBody
from server.protocol.sampling import GenerationBody
from server.protocol.shapes import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from server.streaming import ClientGone, EventStream, first_delta, frames_of, unless_gone

router = APIRouter(prefix="/v1", tags=["generation"])

PROBLEMS = (*READING, 404, 500, 503)

Shape = TypeVar("Shape", bound=GenerationBody)
Translate = Callable[[ServerContext, EngineClient, Shape, Request], Coroutine[Any, Any, tuple[Work, Answer]]]


@router.post(
    "/chat/completions",
    openapi_extra=accepts(ChatBody),
    responses=answers(ChatCompletion, *PROBLEMS, chunk=ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    return await generate(request, ChatBody, translate.chat, "messages")


@router.post(
    "/completions",
    openapi_extra=accepts(CompletionBody),
    responses=answers(Completion, *PROBLEMS, chunk=CompletionChunk),
)
async def completions(request: Request) -> Response:
    """Completes texts or token ids."""
    return await generate(request, CompletionBody, translate.completion, "prompt")


async def generate(request: Request, shape: type[Shape], translation: Translate[Shape], prompt: str) -> Response:
    """`prompt`: the field that the prompt comes from."""
    context = context_of(request)
    try:
        client = context.engine()
        body = await body_of(request, context, shape)
        with about(prompt):
            translated = translation(context, client, body, request)
            work, answer = await while_wanted(request, context, body, translated)
            generation = await Generation.start(client, work, context.metrics)
    except ClientDisconnect:
        context.metrics.request_finished("abort")
        return _gone(context)
    except Exception:
        context.metrics.request_finished("rejected")
        raise
    if body.stream:
        return await _streamed(request, context, generation, answer)
    return await _whole(request, context, generation, answer)


async def _whole(request: Request, context: ServerContext, generation: Generation, answer: Answer) -> Response:
    count = len(generation.work.prompts) * generation.work.params.n
    try:
        choices = await unless_gone(request, collect(generation, count))
        return Response(answer.body(choices, generation.usage), media_type="application/json")
    except ClientGone:
        return _gone(context)
    finally:
        generation.close()


async def _streamed(request: Request, context: ServerContext, generation: Generation, answer: Answer) -> Response:
    keep_alive = context.settings.sse_keep_alive_interval or None
    try:
        first = await first_delta(request, generation, keep_alive)
    except ClientGone:
        generation.close()
        return _gone(context)
    except BaseException:
        generation.close()
        raise
    frames = frames_of(generation, answer, first, keep_alive)
    return EventStream(generation, frames, context.metrics, context.limits.stall_seconds)


def _gone(context: ServerContext) -> Response:
    context.metrics.client_disconnected()
    return Response(status_code=GONE)
