"""GET /openapi.json with the request shapes, which the routes read themselves (limits and error texts are ours)."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.protocol.body import Body

REFERENCE = "#/components/schemas/{model}"


def accepts(shape: type[Body]) -> dict[str, Any]:
    """For a route's `openapi_extra`: this is what it takes."""
    schema = {"$ref": REFERENCE.format(model=shape.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, shapes: list[type[Body]], root_path: str = "") -> dict[str, Any]:
    """The whole document."""
    servers = [{"url": root_path}] if root_path else None
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, servers=servers
    )
    _, schemas = models_json_schema([(shape, "validation") for shape in shapes], ref_template=REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return document
