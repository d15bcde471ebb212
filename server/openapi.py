"""GET /openapi.json: the request shapes, which the routes read themselves (limits and error texts are ours), and the
answers, which the routes write themselves.

Beside what an operation lists, any may answer with the error envelope and 400 (not HTTP), 405, 431 or 500.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.protocol.body import Body
from server.protocol.chat import ChatBody
from server.protocol.completion import CompletionBody
from server.protocol.shapes import ErrorAnswer
from server.protocol.tokens import TokenizeBody
from server.protocol.unsupported import CHAT, COMPLETION, TEMPLATE, restricted

REFERENCE = "#/components/schemas/{model}"
REFUSED = {ChatBody: CHAT, CompletionBody: COMPLETION, TokenizeBody: TEMPLATE}
READING = (400, 408, 413, 415)
"""What reading any body may end with."""

Responses = dict[int | str, dict[str, Any]]


def accepts(shape: type[Body]) -> dict[str, Any]:
    """For a route's `openapi_extra`: this is what it takes."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(shape)}}}}


def answers(shape: type[BaseModel], *problems: int, chunk: type[BaseModel] | None = None) -> Responses:
    """For a route's `responses`: its 200, and the statuses of its errors. `chunk`: each `data:` line if streamed."""
    content: dict[str, Any] = {"application/json": {"schema": _reference(shape)}}
    if chunk is not None:
        content["text/event-stream"] = {"itemSchema": _event(chunk)}
    return {200: {"description": "OK", "content": content}, **{status: problem(status) for status in problems}}


def problem(status: int, shape: type[BaseModel] = ErrorAnswer) -> dict[str, Any]:
    headers = {}
    if status == 503:
        headers = {"retry-after": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}}}
    content = {"application/json": {"schema": _reference(shape)}}
    return {"description": HTTPStatus(status).phrase, "content": content, **({"headers": headers} if headers else {})}


def describe(
    app: FastAPI,
    shapes: Sequence[type[Body]],
    answers: Sequence[type[BaseModel]],
    open_paths: frozenset[str] | None,
    root_path: str = "",
) -> dict[str, Any]:
    """The whole document. `open_paths`: those that need no key; None: none needs one."""
    servers = [{"url": root_path}] if root_path else None
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, servers=servers
    )
    _, inputs = models_json_schema([(shape, "validation") for shape in shapes], ref_template=REFERENCE)
    _, outputs = models_json_schema([(shape, "serialization") for shape in answers], ref_template=REFERENCE)
    refused = {shape.__name__: restricted(inputs["$defs"][shape.__name__], table) for shape, table in REFUSED.items()}
    document.setdefault("components", {})["schemas"] = {**inputs["$defs"], **outputs["$defs"], **refused}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own; a bad query is a 400 here
            if open_paths is not None and path not in open_paths:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = problem(401)
    if open_paths is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event, as OpenAPI 3.2 describes streams."""
    content = {"anyOf": [_reference(chunk), _reference(ErrorAnswer)]}
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    data = {"anyOf": [{"const": "[DONE]", "description": "in the last one"}, json]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _reference(shape: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=shape.__name__)}
