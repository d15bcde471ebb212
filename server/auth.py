"""API keys: everything is closed unless it stands on the list of open paths; what acts on the server itself needs the
admin key.

The decision looks at `scope["path"]` alone, the string that the router matches too: other spellings of an open path
(a slash more, capitals, a forged Host header) are either the same string or not on the list. Whether a route needs the
admin key is not told by its path at all: it has `Depends(admin_only)`, which runs whatever spelling led to it.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import HTTPError, Problem

PROBES = frozenset({"/health", "/ready", "/readyz", "/live", "/livez", "/ping"})
PAGE = frozenset({"/", "/web/page.js", "/web/page.css"})
"""The page and its two files: they hold no data and ask for a key to show any."""
METRICS = "/metrics"

REFUSAL = Problem(
    401,
    "Missing or wrong API key. Send one in the header 'Authorization: Bearer KEY'.",
    code="invalid_api_key",
    headers={"www-authenticate": 'Bearer realm="octavo"'},
)


NO_ADMIN_KEY = Problem(
    403,
    "This route acts on the server itself and is closed: the server was started without --admin-api-key.",
    code="admin_key_required",
)
NOT_ADMIN = Problem(403, "This route acts on the server itself: it needs the admin key.", code="admin_key_required")


@dataclass(frozen=True)
class Caller:
    """Who asks. The tenant is a digest of the key, fit for cache salts and never for display."""

    tenant: str | None = None
    is_admin: bool = False


class Keyring:
    """The configured keys. Without an API key everybody is let in as the same nameless caller, whom the admin key alone
    makes more."""

    def __init__(self, keys: Sequence[str], admin_key: str | None = None) -> None:
        self._keys = [(key.encode(), Caller(_digest(key))) for key in keys]
        self.has_admin_key = admin_key is not None
        self.is_closed = bool(self._keys)
        """Whether callers must show a key."""
        if admin_key is not None:
            self._keys.append((admin_key.encode(), Caller(_digest(admin_key), is_admin=True)))

    def identify(self, authorization: str | None) -> Caller | None:
        """The key's owner, or None. Compares every key in constant time, as bytes: a header may hold any of them."""
        scheme, _, credentials = (authorization or "").partition(" ")
        offered = credentials.strip().encode("latin-1", "replace")
        found = None
        for key, caller in self._keys:
            if hmac.compare_digest(key, offered) and scheme.lower() == "bearer":
                found = caller
        return found


def open_paths(protect_metrics: bool) -> frozenset[str]:
    """What nobody needs a key for."""
    return PROBES | PAGE | (frozenset() if protect_metrics else {METRICS})


def _digest(key: str) -> str:
    return hashlib.sha256(b"octavo-key:" + key.encode()).hexdigest()


class APIKeyMiddleware:
    """Answers 401 by itself; whoever passes finds its `Caller` in `scope["state"]["caller"]`."""

    def __init__(self, app: ASGIApp, keyring: Keyring, protect_metrics: bool) -> None:
        self._app = app
        self._keyring = keyring
        self._open = open_paths(protect_metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        caller = self._keyring.identify(Headers(scope=scope).get("authorization"))
        if caller is None and (not self._keyring.is_closed or scope["path"] in self._open):
            caller = Caller()
        if caller is None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await REFUSAL.response()(scope, receive, send)
        scope.setdefault("state", {}).update(caller=caller, has_admin_key=self._keyring.has_admin_key)
        await self._app(scope, receive, send)
        return None


async def admin_only(request: Request) -> None:
    """A dependency of control routes: `APIRouter(dependencies=[Depends(admin_only)])`. Raises `HTTPError` 403, or 401
    for who has shown no key at all."""
    if request.state.caller.is_admin:
        return
    if not request.state.has_admin_key:
        raise HTTPError(NO_ADMIN_KEY)
    raise HTTPError(REFUSAL if request.state.caller.tenant is None else NOT_ADMIN)
