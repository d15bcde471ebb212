"""From the bytes of a request body to a checked model, or to a 400 that names the field."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from engine import InvalidRequest

_FIELD = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "dict", "list"})


def number(value: object) -> object:
    """Neither booleans nor numbers written as strings, both of which pydantic would convert."""
    if isinstance(value, bool | str):
        raise ValueError("Input should be a number, not a boolean or a string")
    if isinstance(value, int) and abs(value) >= 10**100:
        raise ValueError("Input should be a number of at most 100 digits")
    return value


INT32_MAX = 2**31 - 1

Int = Annotated[int, BeforeValidator(number)]
"""An integer; 16.0 is one too."""
Float = Annotated[float, BeforeValidator(number)]
Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), BeforeValidator(number)]
TokenId = Annotated[int, Strict()]
"""In lists, which may be long: checked without calling Python for each item."""


class Body(BaseModel):
    """Base of all request shapes: unknown fields are ignored, numbers are finite."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=())


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(shape: type[AnyBody], body: bytes) -> AnyBody:
    """Raises `InvalidRequest` with the dotted path of the first bad field, e.g. 'messages.0.role'.

    The parser itself bounds nesting, so that a deeply nested body is an ordinary 400.
    """
    try:
        return shape.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=False, include_input=False)) from None


def _explain(details: list[Any]) -> InvalidRequest:
    first = details[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The request body is not valid JSON: {_plain(first['msg'])}.", None, "invalid_json")
    # The members of a union fail one by one. The one that got furthest is what the client meant; what several at the
    # same place would have taken belongs into one sentence.
    of_field = [detail for detail in details if detail["loc"][:1] == first["loc"][:1]]
    param = max((_path(detail["loc"]) for detail in of_field), key=lambda path: path.count("."))
    reasons = dict.fromkeys(_plain(detail["msg"]) for detail in details if _path(detail["loc"]) == param)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    subject = f"{param}: " if param else ""
    return InvalidRequest(subject + " or ".join(reasons), param or None, code)


def _path(location: Iterable[str | int]) -> str:
    """pydantic's location without the names of union members ('str', 'list[str]', 'TextPart')."""
    kept = []
    for part in location:
        if isinstance(part, int) or (_FIELD.fullmatch(part) and part not in _UNION_TAGS):
            kept.append(str(part))
    return ".".join(kept)


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Invalid JSON: ")
