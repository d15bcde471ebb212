"""From the bytes of a request body to a checked model, or to a 400 that names the field."""

import logging
from typing import Annotated, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, Strict, ValidationError

from server.protocol.refusal import MAX_DIGITS, expected, refusal, shown

logger = logging.getLogger("octavo.server")

MAX_LOGGED_NAMES = 20
MAX_ECHOED_BODY = 1 << 16
"""Bytes of a body whose bad values are shown: each of them is built once more for that."""


def integer(value: object) -> object:
    return _numeric(value, "an integer")


def number(value: object) -> object:
    return _numeric(value, "a number")


def _numeric(value: object, kind: str) -> object:
    """Neither booleans nor numbers written as strings, both of which pydantic would convert."""
    if isinstance(value, bool | str):
        raise expected(kind)
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise expected(f"{kind} of at most {MAX_DIGITS} digits")
    return value


INT32_MAX = 2**31 - 1

Int = Annotated[int, BeforeValidator(integer)]
"""An integer; 16.0 is one too."""
Float = Annotated[float, BeforeValidator(number)]
Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), BeforeValidator(integer)]
TokenId = Annotated[int, Strict(), Field(ge=-INT32_MAX, le=INT32_MAX)]
"""In lists, which may be long: checked without calling Python for each item."""


class Body(BaseModel):
    """Base of all request shapes: unknown fields are ignored, numbers are finite."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())
    _num_bytes: int = PrivateAttr(default=0)

    @property
    def num_bytes(self) -> int:
        """Of JSON that it came in, as a measure of what all of it may cost."""
        return self._num_bytes


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(shape: type[AnyBody], body: bytes) -> AnyBody:
    """Raises `InvalidRequest` with the dotted path of the first bad field, e.g. 'messages.0.role'.

    The parser itself bounds nesting, so that a deeply nested body is an ordinary 400.
    """
    try:
        parsed = shape.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_input=len(body) <= MAX_ECHOED_BODY)) from None
    parsed._num_bytes = len(body)
    if logger.isEnabledFor(logging.DEBUG):
        _log_ignored(shape, body)
    return parsed


def _log_ignored(shape: type[Body], body: bytes) -> None:
    """A misspelt field changes nothing; its name, never its value, goes to the log."""
    ignored = sorted(msgspec.json.decode(body).keys() - shape.model_fields.keys())
    if ignored:
        names = ", ".join(map(shown, ignored[:MAX_LOGGED_NAMES]))
        logger.debug("%d unknown fields are ignored: %s", len(ignored), names)
