"""GET /: a small page that says what this is and shows the KV cache at work. Static; figures come from /debug/kv."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


@router.get("/")
async def page() -> Response:
    return _file("index.html", "text/html")


@router.get("/web/page.js")
async def script() -> Response:
    return _file("page.js", "text/javascript")


@router.get("/web/page.css")
async def style() -> Response:
    return _file("page.css", "text/css")


def _file(name: str, media_type: str) -> Response:
    return Response(_read(name), media_type=media_type, headers=HEADERS)


@cache
def _read(name: str) -> bytes:
    return (files("server") / "web" / name).read_bytes()
