"""API keys: everything is closed unless it stands on the list of open paths.

The decision looks at `scope["path"]` alone, the string that the router matches too: other spellings of an open path
(a slash more, capitals, a forged Host header) are either the same string or not on the list.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import Problem

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


@dataclass(frozen=True)
class Caller:
    """Who asks. The tenant is a digest of the key, fit for cache salts and never for display."""

    tenant: str | None = None


class Keyring:
    """The configured keys. Without any, everybody is let in as the same nameless caller."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(key.encode(), Caller(hashlib.sha256(b"octavo-key:" + key.encode()).hexdigest())) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def identify(self, authorization: str | None) -> Caller | None:
        """The key's owner, or None. Compares every key in constant time, as bytes: a header may hold any of them."""
        scheme, _, credentials = (authorization or "").partition(" ")
        offered = credentials.strip().encode("latin-1", "replace")
        found = None
        for key, caller in self._keys:
            if hmac.compare_digest(key, offered) and scheme.lower() == "bearer":
                found = caller
        return found


class APIKeyMiddleware:
    """Answers 401 by itself; whoever passes finds its `Caller` in `scope["state"]["caller"]`."""

    def __init__(self, app: ASGIApp, keyring: Keyring, protect_metrics: bool) -> None:
        self._app = app
        self._keyring = keyring
        self._open = PROBES | PAGE | (frozenset() if protect_metrics else {METRICS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        caller: Caller | None = Caller()
        if self._keyring and scope["path"] not in self._open:
            caller = self._keyring.identify(Headers(scope=scope).get("authorization"))
        if caller is None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await REFUSAL.response()(scope, receive, send)
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
        return None
