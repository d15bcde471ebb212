"""What the routes share: settings, metrics and the engine, which comes later than the first probe."""

import hashlib
import time
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from configs.settings import Settings
from configs.version import VERSION
from engine import EngineClient, EngineLoading, EngineReady, NotReady
from server.aside import Aside
from server.auth import Caller
from server.errors import HTTPError, Problem
from server.limits import HTTPLimits
from server.logs import RequestLog
from server.metrics import Metrics

Readiness = Literal["ready", "loading", "draining", "dead", "overloaded"]

MAX_SHOWN_NAME = 100
"""Characters of a client's own words that an error message repeats."""
NUMERICS = ("model", "dtype", "attention", "linear")
"""Lines of the engine's summary that decide an answer's bits; threads and the pool's size do not."""


@dataclass
class ServerContext:
    """One an app. `client` is None while the model's files are still being fetched."""

    settings: Settings
    metrics: Metrics
    client: EngineClient | None = None
    limits: HTTPLimits = field(default_factory=HTTPLimits)
    loading: EngineLoading = field(default_factory=lambda: EngineLoading("starting"))
    """Progress, as the probes show it."""
    log: RequestLog = field(init=False)
    """The engine client's observer; passes on to `metrics`."""
    aside: Aside = field(init=False)
    """Threads for what would hold up the event loop."""
    fingerprint: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.log = RequestLog(self.metrics)
        self.aside = Aside(self.limits)

    async def engine_ready(self) -> EngineReady:
        """Waits for the engine. Raises `StartupError` or `EngineDead`."""
        assert self.client is not None
        info = await self.client.ready()
        self.metrics.engine_ready(self.client.model.name, info)
        numerics = [VERSION, *(f"{key}: {info.summary[key]}" for key in NUMERICS if key in info.summary)]
        self.fingerprint = "fp_" + hashlib.sha256("\n".join(numerics).encode()).hexdigest()[:12]
        return info

    def engine(self) -> EngineClient:
        """Raises `NotReady` while there is none."""
        if self.client is None:
            self.metrics.rejected("loading")
            raise NotReady(f"The model is still loading ({self.loading.phase}). Please try again soon.", "loading")
        return self.client

    @property
    def phase(self) -> Literal["loading", "ready", "draining", "dead"]:
        return "loading" if self.client is None else self.client.phase

    @property
    def readiness(self) -> Readiness:
        """Whether a load balancer should send requests here."""
        if self.client is not None and self.phase == "ready" and self.client.queue_is_full():
            return "overloaded"
        return self.phase

    def served_name(self, asked: str | None) -> str:
        """The model's name as the answer shows it. Raises `HTTPError` 404 for any other model."""
        names = self.engine().model.names
        if asked is None:
            return names[0]
        if asked not in names:
            shown = asked if len(asked) <= MAX_SHOWN_NAME else asked[: MAX_SHOWN_NAME - 1] + "…"
            message = f"The model {shown!r} does not exist; this server has {', '.join(map(repr, names))}."
            raise HTTPError(Problem(404, message, "model", "model_not_found"))
        return asked


def context_of(request: Request) -> ServerContext:
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


def caller_of(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller
