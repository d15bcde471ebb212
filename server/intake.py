"""A request's body, from the connection to the checked model; what is large never holds up the event loop for long."""

from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from server.context import ServerContext
from server.limits import read_body
from server.protocol.body import Body, parse
from server.streaming import unless_gone

Shape = TypeVar("Shape", bound=Body)
Result = TypeVar("Result")


async def body_of(request: Request, context: ServerContext, shape: type[Shape]) -> Shape:
    """Raises what `read_body` and `parse` raise."""
    raw = await read_body(request, context.limits)
    if len(raw) <= context.limits.parse_size:
        return parse(shape, raw)
    return await unless_gone(request, context.aside.run(len(raw), partial(parse, shape, raw)))


async def while_wanted(
    request: Request, context: ServerContext, body: Body, work: Coroutine[Any, Any, Result]
) -> Result:
    """`work`'s result. Where the body is large it may wait for its turn, and is dropped if the client goes meanwhile:
    raises `ClientGone` then."""
    if body.num_bytes <= context.limits.light_size:
        return await work
    return await unless_gone(request, work)
