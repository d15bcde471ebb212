"""The HTTP application, and the command that serves it.

RequestContext (id, last catch, metrics) ─> APIKeyMiddleware ─> routes ─> EngineClient
"""

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from configs.settings import Settings
from configs.version import VERSION
from engine import OctavoError, configure_logging
from server.auth import APIKeyMiddleware, Keyring, open_paths
from server.context import ServerContext
from server.errors import HTTPError, problem_of
from server.exposition import build_registry
from server.logs import GONE
from server.metrics import Metrics
from server.middleware import RequestContext
from server.openapi import describe
from server.protocol.body import Body
from server.protocol.chat import ChatBody
from server.protocol.completion import CompletionBody
from server.protocol.shapes import ANSWERS
from server.protocol.tokens import DetokenizeBody, TokenizeBody
from server.routes import control, generate, kv, models, page, probes, tokens
from server.serving import Serving

ROUTERS = (
    generate.router,
    models.router,
    tokens.router,
    kv.router,
    control.router,
    probes.router,
    page.router,
)
SHAPES: list[type[Body]] = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, control.AbortBody]


def create_app(context: ServerContext) -> FastAPI:
    """The application around a context, whose client may come later."""
    settings = context.settings
    app = FastAPI(
        title="Octavo",
        version=VERSION,
        description="OpenAI-compatible LLM inference whose subject is the KV cache.",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    app.state.registry = build_registry(
        context.metrics,
        phase=lambda: context.phase,
        compat=settings.metrics_compat == "vllm",
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )
    for router in ROUTERS:
        app.include_router(router)
    _answer_head(app)
    keyless = _keyless(settings)
    app.openapi = lambda: describe(app, SHAPES, ANSWERS, keyless, settings.root_path)  # type: ignore[method-assign]
    for kind in (OctavoError, HTTPError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_middleware(APIKeyMiddleware, Keyring(settings.api_key, settings.admin_api_key), settings.protect_metrics)
    app.add_middleware(RequestContext, context.metrics, context.log, settings.root_path)
    return app


def _keyless(settings: Settings) -> frozenset[str] | None:
    """Paths that need no key; None: none needs one."""
    if settings.api_key:
        return open_paths(settings.protect_metrics)
    if settings.admin_api_key:
        others = [route for router in ROUTERS if router is not control.router for route in router.routes]
        return frozenset(route.path_format for route in others if isinstance(route, APIRoute))
    return None


def _answer_head(app: FastAPI) -> None:
    """HEAD on every route that takes GET, as HTTP asks (RFC 9110, section 9.1); FastAPI leaves it out."""
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                dependencies=route.dependencies,  # who may not GET may not HEAD
                include_in_schema=False,
            )


def serve(settings: Settings) -> int:
    """Serves until a signal or the engine's end. Returns the exit code; raises `StartupError` where it cannot start."""
    configure_logging(settings.log_level, settings.log_format)
    context = ServerContext(settings, Metrics())
    return Serving(context, create_app(context)).run()


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        error.headers = {**(error.headers or {}), **_allow(request.scope)}
    return problem_of(error).response()


def _allow(scope: Scope) -> dict[str, str]:
    """The header, with every method that the path takes: the router names those of one route alone."""
    routes = (route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute))
    methods = {
        method for route in routes if route.matches(scope)[0] is not Match.NONE for method in route.methods or ()
    }
    if "GET" in methods:
        methods.add("HEAD")
    return {"Allow": ", ".join(sorted(methods))} if methods else {}


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)
