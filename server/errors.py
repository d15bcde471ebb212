"""OpenAI's error envelope: the body of every answer that is not 2xx, whatever layer made it.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Clients choose the exception class by status and show `message`; `x-should-retry: false` keeps them from repeating what
cannot succeed, `retry-after` and `retry-after-ms` tell them when a repetition may.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine import EngineDead, InvalidRequest, NotReady, Overloaded, RequestFailed
from server.protocol.refusal import refusal

LOADING_RETRY_SECONDS = 2.0
DRAINING_RETRY_SECONDS = 5.0
TYPES = {403: "permission_error", 429: "rate_limit_error"}
"""What OpenAI calls the errors of these statuses; others go by their class."""
NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True)
class Problem:
    """One error, ready to be sent as a status or inside a stream."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        if self.status in TYPES:
            return TYPES[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, media_type="application/json")


class HTTPError(Exception):
    """A refusal decided by the HTTP layer itself."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@contextmanager
def about(param: str) -> Iterator[None]:
    """Names the field in refusals from where nobody knows which one it was: of a text, or of a prompt's length. Of
    several prompts, the one it is about: `prompt.1`."""
    try:
        yield
    except InvalidRequest as error:
        place = param if error.prompt is None else f"{param}.{error.prompt}"
        error.param = error.param or place
        raise


def problem_of(error: Exception) -> Problem:
    """What the client is told of `error`. Nothing of an unforeseen one: that goes to the log."""
    match error:
        case HTTPError():
            return error.problem
        case InvalidRequest():
            return Problem(400, error.message, error.param, error.code)
        case Overloaded():
            return Problem(503, error.message, code="overloaded", headers=retry_after(error.retry_after))
        case NotReady():
            seconds = LOADING_RETRY_SECONDS if error.phase == "loading" else DRAINING_RETRY_SECONDS
            return Problem(503, error.message, code="engine_not_ready", headers=retry_after(seconds))
        case EngineDead():
            return Problem(500, f"The engine has stopped: {error}.", code="engine_dead", headers=NO_RETRY)
        case RequestFailed():
            return Problem(500, str(error), code="request_failed", headers=NO_RETRY)
        case RequestValidationError():
            # Of a query: the rest of the location starts with 'query'.
            return problem_of(refusal([{**detail, "loc": detail["loc"][1:]} for detail in error.errors()]))
        case HTTPException():
            return Problem(
                error.status_code,
                _sentence(error),
                code=_ROUTING_CODES.get(error.status_code),
                headers=error.headers or {},
            )
        case _:
            return Problem(500, "The server met an internal error.", code="internal_error", headers=NO_RETRY)


def retry_after(seconds: float) -> dict[str, str]:
    """Both spellings: whole seconds for everybody, milliseconds for the OpenAI clients."""
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, round(seconds * 1000)))}


_ROUTING_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def _sentence(error: HTTPException) -> str:
    if error.status_code == 404:
        return "Unknown request URL. GET /openapi.json lists the routes of this server."
    if error.status_code == 405:
        return f"This route does not take that method; it takes {(error.headers or {}).get('Allow', 'others')}."
    return error.detail
