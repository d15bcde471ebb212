"""Fields that are documented and not served: refused by name rather than ignored, since ignoring changes the answer.

A feature that arrives takes its rows out of these tables and brings its own module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine import InvalidRequest
from server.protocol.body import Body


def _absent(value: Any) -> bool:
    return value is None


def _empty(value: Any) -> bool:
    return value is None or value == [] or value == {} or value == ""


def _false(value: Any) -> bool:
    return value is None or value is False


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in values


@dataclass(frozen=True)
class Unsupported:
    field: str
    is_harmless: Callable[[Any], bool]
    """Values that ask for nothing."""
    why: str = "is not supported by this server yet"


COMMON = (
    Unsupported("response_format", _one_of({"type": "text"}), "other than {'type': 'text'} is not supported yet"),
    Unsupported("structured_outputs", _absent),
    Unsupported("guided_json", _absent),
    Unsupported("guided_regex", _absent),
    Unsupported("guided_choice", _absent),
    Unsupported("guided_grammar", _absent),
    Unsupported("use_beam_search", _false),
)
TEMPLATE = (
    Unsupported("tools", _empty),
    Unsupported("chat_template", _absent, "is not taken from requests: it would run the client's code in the server"),
    Unsupported("documents", _empty),
)
CHAT = (
    *COMMON,
    *TEMPLATE,
    Unsupported("echo", _false, "is for raw completions"),
    Unsupported("tool_choice", _one_of("none", "auto"), "needs tools, and those are not supported by this server yet"),
    Unsupported("functions", _empty),
    Unsupported("function_call", _one_of("none", "auto"), "needs functions, and those are not supported"),
    Unsupported("modalities", _one_of([], ["text"]), "other than ['text'] is not supported by this model"),
    Unsupported("audio", _absent, "is not supported by this model"),
    Unsupported("web_search_options", _absent, "is not supported by this server"),
    Unsupported("moderation", _absent, "is not supported by this server"),
    Unsupported("store", _false, "is not supported: this server keeps no completions"),
)
COMPLETION = (*COMMON, Unsupported("suffix", _empty))


def refuse(body: Body, table: tuple[Unsupported, ...]) -> None:
    """Raises `InvalidRequest` for the first field that asks for something this server does not do."""
    for row in table:
        if not row.is_harmless(getattr(body, row.field)):
            raise InvalidRequest(f"{row.field} {row.why}.", row.field, "unsupported_parameter")
