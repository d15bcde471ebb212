"""What probes say, and HEAD on everything that can be got."""

import threading
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute
from kit import MODEL, ScriptedServer, endless, eventually
from refusals import assert_refused

from server.app import ROUTERS

LIVENESS = ("/health", "/live", "/livez", "/ping")
READINESS = ("/ready", "/readyz")
GETTABLE = sorted(
    {"/openapi.json"}
    | {
        route.path.replace("{model:path}", MODEL)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in route.methods
    }
)


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEF", "long": endless}, admin_api_key="admin") as server:
        yield server


# ---------------------------------------------------------------------- HEAD
def test_the_list_of_routes_is_the_apps(server: ScriptedServer) -> None:
    documented = {path for path, methods in server.app.openapi()["paths"].items() if "get" in methods}
    assert {path.replace("{model}", MODEL) for path in documented} <= set(GETTABLE)
    assert {"/", "/debug/kv", "/metrics", "/version", "/v1/models", *LIVENESS, *READINESS} <= set(GETTABLE)


@pytest.mark.parametrize("path", GETTABLE)
def test_head_answers_as_get_without_a_body(server: ScriptedServer, path: str) -> None:
    admin = {"authorization": "Bearer admin"}
    head, get = server.http.head(path, headers=admin), server.http.get(path, headers=admin)
    assert head.status_code == get.status_code == 200 and not head.content and get.content
    for name in ("content-type", "cache-control", "content-security-policy"):
        assert head.headers.get(name) == get.headers.get(name), name
    assert int(head.headers["content-length"]) > 0


def test_head_is_no_way_around_the_key() -> None:
    with ScriptedServer({}, api_key=["k"]) as server:
        nobody = {"authorization": "Bearer x"}
        for path in GETTABLE:
            got, headed = (server.http.request(method, path, headers=nobody) for method in ("GET", "HEAD"))
            assert got.status_code == headed.status_code, path
        assert server.http.head("/debug/kv", headers=nobody).status_code == 401


def test_head_stays_out_of_the_description_and_off_other_routes(server: ScriptedServer) -> None:
    assert all("head" not in methods for methods in server.app.openapi()["paths"].values())
    assert server.http.head("/v1/completions").status_code == 405
    assert server.http.head("/nothing").status_code == 404


# ---------------------------------------------------------------------- bodies
@pytest.mark.parametrize("path", [*LIVENESS, *READINESS])
def test_well(server: ScriptedServer, path: str) -> None:
    answer = server.http.get(path)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"status": "ok", "phase": "ready"}


@pytest.mark.parametrize("path", [*LIVENESS, *READINESS, "/version"])
def test_the_answer_ends_its_line(server: ScriptedServer, path: str) -> None:
    """For who reads it in a terminal."""
    assert server.http.get(path).content.endswith(b"}\n")


def test_ping_may_be_posted(server: ScriptedServer) -> None:
    assert server.http.post("/ping").json() == {"status": "ok", "phase": "ready"}


def test_loading_is_alive_and_not_ready() -> None:
    with ScriptedServer({}, loads=threading.Event()) as server:
        eventually(lambda: server.http.get("/readyz").json().get("detail") == "loading weights")
        for path in LIVENESS:
            assert server.http.get(path).json() == {"status": "ok", "phase": "loading"}
        for path in READINESS:
            assert_refused(server.http.get(path), 503, code="engine_not_ready")
            body = server.http.get(path).json()
            assert body.pop("error")["message"] == "The model is still loading."
            assert body == {
                "status": "unavailable",
                "phase": "loading",
                "detail": "loading weights",
                "progress": 0.5,
            }


def test_dead_says_so_everywhere() -> None:
    with ScriptedServer({"s1": b"A"}) as server:
        server.executor.fatal = RuntimeError("a bit has flipped")
        assert server.post_chat("s1").status_code == 500
        for path, code in [(p, "engine_dead") for p in LIVENESS] + [(p, "engine_not_ready") for p in READINESS]:
            error = assert_refused(server.http.get(path), 503, code=code)
            assert "The engine has stopped" in error["message"]
            body = server.http.get(path).json()
            assert body["status"] == "unavailable" and body["phase"] == "dead"
            assert server.http.get(path).content.endswith(b"}\n")
            assert server.http.head(path).status_code == 503
