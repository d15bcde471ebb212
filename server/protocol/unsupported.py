"""Fields that are documented and not served: refused by name rather than ignored, since ignoring changes the answer.

A feature that arrives takes its rows out of these tables and brings its own module.
"""

from collections.abc import Mapping
from typing import Any

from engine import InvalidRequest
from server.protocol.body import Body
from server.protocol.foreign import FOREIGN_IN_CHAT, FOREIGN_IN_COMPLETION
from server.protocol.refused import EMPTY, NOTHING, OFF, Unsupported

COMMON = (
    Unsupported("response_format", ({"type": "text"},), "other than {'type': 'text'} is not supported yet"),
    Unsupported("structured_outputs", NOTHING),
    Unsupported("guided_json", NOTHING),
    Unsupported("guided_regex", NOTHING),
    Unsupported("guided_choice", NOTHING),
    Unsupported("guided_grammar", NOTHING),
    Unsupported("use_beam_search", OFF),
)
TEMPLATE = (
    Unsupported("tools", EMPTY),
    Unsupported("chat_template", NOTHING, "is not taken from requests: it would run the client's code in the server"),
    Unsupported("documents", EMPTY),
    Unsupported("enable_thinking", NOTHING, "belongs into chat_template_kwargs, where the model's template knows it"),
)
CHAT = (
    *COMMON,
    *TEMPLATE,
    Unsupported("echo", OFF, "is for raw completions"),
    Unsupported("tool_choice", ("none", "auto"), "needs tools, and those are not supported by this server yet"),
    Unsupported("functions", EMPTY),
    Unsupported("function_call", ("none", "auto"), "needs functions, and those are not supported"),
    Unsupported("modalities", ([], ["text"]), "other than ['text'] is not supported by this model"),
    Unsupported("audio", NOTHING, "is not supported by this model"),
    Unsupported("web_search_options", NOTHING, "is not supported by this server"),
    Unsupported("moderation", NOTHING, "is not supported by this server"),
    Unsupported("store", OFF, "is not supported: this server keeps no completions"),
    *FOREIGN_IN_CHAT,
)
COMPLETION = (*COMMON, Unsupported("suffix", EMPTY), *FOREIGN_IN_COMPLETION)


def refuse(body: Body, table: tuple[Unsupported, ...]) -> None:
    """Raises `InvalidRequest` for the first field that asks for something this server does not do."""
    for row in table:
        if not row.is_harmless(getattr(body, row.field)):
            raise InvalidRequest(f"{row.field} {row.why}.", row.field, "unsupported_parameter")


def restricted(schema: Mapping[str, Any], table: tuple[Unsupported, ...]) -> dict[str, Any]:
    """A body's JSON schema in which the table's fields take harmless values only."""
    rows = {row.field: {"enum": [None, *row.harmless], "description": f"{row.field} {row.why}."} for row in table}
    return {**schema, "properties": {**schema["properties"], **rows}}
