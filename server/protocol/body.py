"""From the bytes of a request body to a checked model, or to a 400 that names the field."""

import gc
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, Strict, ValidationError

from engine import InvalidRequest
from server.protocol.refusal import MAX_DIGITS, expected, refusal, shown

logger = logging.getLogger("octavo.server")

MAX_LOGGED_NAMES = 20
MAX_ECHOED_BODY = 1 << 16
"""Bytes of a body whose bad values are shown: each of them is built once more for that."""
MAX_VALUES = 5 << 18
"""JSON values that a body may have: what is built from them takes the interpreter's lock, 0.1 to 0.3 µs each."""
MAX_BRACKETS = 1 << 18
"""Lists and objects among them: those take longer, and the garbage collector goes through them later."""
MAX_KEYS = 1 << 16
"""Keys of objects that a body may have: those take ten times as long, and more."""
_STRING = re.compile(rb'"[^"]*+(?:"(\s*+:)?|\Z)')
"""A string, or what is left of one where the body breaks off, so that each byte is looked at once. A colon makes it a
key."""


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

Bool = Annotated[bool, Strict()]
"""true or false, no other value that Python would take for one."""
Int = Annotated[int, BeforeValidator(integer)]
"""An integer; 16.0 is one too."""
Float = Annotated[float, BeforeValidator(number)]
Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), BeforeValidator(integer)]
TokenId = Annotated[int, Strict(), Field(ge=-INT32_MAX, le=INT32_MAX)]
"""In lists, which may be long: checked without calling Python for each item."""


class Body(BaseModel):
    """Base of all request shapes: unknown fields are ignored, numbers are finite."""

    model_config = ConfigDict(
        extra="ignore", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )
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
    is_large = len(body) > MAX_KEYS
    if is_large:
        _check_counts(body)
    try:
        with uncollected() if is_large else nullcontext():
            parsed = shape.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_input=len(body) <= MAX_ECHOED_BODY)) from None
    parsed._num_bytes = len(body)
    if logger.isEnabledFor(logging.DEBUG):
        _log_ignored(shape, body)
    return parsed


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in here: as lists are built by the thousand it would go through all of them again and
    again, nothing is garbage yet, and every other thread would wait, the event loop among them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_counts(body: bytes) -> None:
    """By what separates values and keys: quicker than any parser. Texts' own commas, brackets and braces count too."""
    brackets = body.count(b"[") + body.count(b"{")
    values = 1 + body.count(b",") + brackets
    if brackets > MAX_BRACKETS:
        message = f"The request body may have {MAX_BRACKETS} opening brackets and braces at most"
        raise InvalidRequest(f"{message}, got {brackets}.", None, "request_too_complex")
    if values > MAX_VALUES:
        message = f"The request body may have {MAX_VALUES} values at most (commas, brackets and braces are counted)"
        raise InvalidRequest(f"{message}, got {values}.", None, "request_too_complex")
    if body.count(b":") > MAX_KEYS:  # most are in texts
        _check_keys(body.replace(b"\\\\", b"").replace(b'\\"', b""))


def _check_keys(body: bytes) -> None:
    """`body`: without escaped quotes."""
    keys = 0
    for number, match in enumerate(_STRING.finditer(body)):
        keys += match[1] is not None
        if keys > MAX_KEYS or number > MAX_VALUES:
            message = f"The request body may have {MAX_KEYS} keys of objects at most."
            raise InvalidRequest(message, None, "request_too_complex")


def num_values(*values: Any, limit: int) -> int:
    """Of JSON values and models, at every depth, null ones excepted. Stops counting beyond `limit`."""
    count, open_values = 0, list(values)
    while open_values and count <= limit:
        value = open_values.pop()
        items: Iterable[Any] = ()
        if isinstance(value, BaseModel):
            items = (*value.__dict__.values(), *(value.model_extra or {}).values())
        elif isinstance(value, dict):
            items = value.values()
        elif isinstance(value, list):
            items = value
        held = len(open_values)
        open_values.extend(item for item in items if item is not None)
        count += len(open_values) - held
    return count


def _log_ignored(shape: type[Body], body: bytes) -> None:
    """A misspelt field changes nothing; its name, never its value, goes to the log."""
    ignored = sorted(msgspec.json.decode(body).keys() - shape.model_fields.keys())
    if ignored:
        names = ", ".join(map(shown, ignored[:MAX_LOGGED_NAMES]))
        logger.debug("%d unknown fields are ignored: %s", len(ignored), names)
