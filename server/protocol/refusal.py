"""What pydantic finds wrong with a request, in our words: the field, its value, and what it must be instead."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from engine import InvalidRequest

MAX_SHOWN = 60
"""Characters of a value that a message repeats."""
MAX_DIGITS = 100
_FIELD = re.compile(r"[a-z_][a-z0-9_]{0,63}|-?[0-9]{1,20}", re.ASCII)
_UNION_TAGS = frozenset({"str", "int", "float", "bool", "dict", "list"})
EXPECTED = "expected"
"""The type of our own validators' errors; their message is what the value must be."""
_EXPECTATIONS = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_parsing_size": f"an integer of at most {MAX_DIGITS} digits",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "one of {expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of {min_length} or more entries",
    "too_long": "a list of at most {max_length} entries",
}
"""By pydantic's type of error; filled in from its context."""


def expected(what: str, got: str | None = None) -> PydanticCustomError:
    """For validators of our own: the value must be `what`. `got`: where it is not the value itself."""
    context = None if got is None else {"got": got}
    return PydanticCustomError(EXPECTED, what, context)


def refusal(details: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """About the first bad field; the others are named."""
    first = details[0]
    if first["type"] == "json_invalid":
        reason = first["msg"].removeprefix("Invalid JSON: ")
        return InvalidRequest(f"The request body is not valid JSON: {reason}.", None, "invalid_json")
    by_path: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for detail in details:
        by_path.setdefault(_path(detail["loc"]), []).append(detail)
    # The members of a union fail one by one. The one that got furthest is what the client meant; what several at the
    # same place would have taken belongs into one sentence.
    outer = {path[:length] for path in by_path for length in range(1, len(path))}
    return InvalidRequest.first_of([_of_field(path, by_path[path]) for path in by_path if path not in outer])


def _of_field(path: tuple[str, ...], details: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    param = ".".join(path)
    if any(detail["type"] == "missing" for detail in details):
        return InvalidRequest(f"{param} is required.", param, "missing_required_parameter")
    wanted = " or ".join(dict.fromkeys(_expectation(detail) for detail in details))
    message = f"{param or 'The request body'} must be {wanted}{_got(details[0])}."
    return InvalidRequest(message, param or None, "invalid_value")


def _got(detail: Mapping[str, Any]) -> str:
    """Large bodies come without their values."""
    if "got" in detail.get("ctx", {}):
        return f", got {detail['ctx']['got']}"
    return f", got {shown(detail['input'])}" if "input" in detail else ""


def _expectation(detail: Mapping[str, Any]) -> str:
    if detail["type"] == EXPECTED:
        return str(detail["msg"])
    return _EXPECTATIONS.get(detail["type"], "of another kind").format_map(detail.get("ctx", {}))


def shown(value: Any) -> str:
    """A value as a message repeats it: short, and as it stands in JSON."""
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 1] + "…", ensure_ascii=False)
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        return f"a number of more than {MAX_DIGITS} digits"
    return json.dumps(value)


def _path(location: Iterable[str | int]) -> tuple[str, ...]:
    """pydantic's location without the names of union members ('str', 'list[str]', 'TextPart')."""
    kept = []
    for part in location:
        if isinstance(part, int) or (_FIELD.fullmatch(part) and part not in _UNION_TAGS):
            kept.append(str(part))
    return tuple(kept)
