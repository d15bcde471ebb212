"""A36: the key covers every route and every spelling."""

import logging
from collections.abc import Iterator

import pytest
from fastapi import APIRouter, Depends
from kit import ScriptedServer
from refusals import assert_refused

from server.auth import PAGE, PROBES, Keyring, admin_only
from server.translate import cache_salt

KEY, OTHER = "octavo-secret-1", "octavo-secret-2"
OPEN = PROBES | PAGE | {"/metrics"}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABC"}, api_key=(KEY, OTHER)) as server:
        server.http.headers.pop("authorization")
        yield server


def routes(server: ScriptedServer) -> list[tuple[str, str]]:
    """(method, path) of every route there is, so that new ones are covered."""
    found = [
        (method.upper(), path.replace("{model}", "scripted"))
        for path, methods in server.app.openapi()["paths"].items()
        for method in methods
    ]
    return [*found, ("GET", "/openapi.json"), *(("GET", path) for path in sorted(PAGE))]


def test_a36_every_route(server: ScriptedServer):
    assert len(routes(server)) > 15
    for method, path in routes(server):
        for host in ("kit", "localhost/health?", "localhost/metrics#", "x/health"):
            status = server.http.request(method, path, headers={"host": host}).status_code
            expected = {200} if path in OPEN else {401}
            assert status in expected | {400}, (method, path, host, status)


def test_a36_every_spelling(server: ScriptedServer):
    steps = server.context.client.stats.steps_total
    for method, path in routes(server):
        spellings = (
            path + "/",
            "/" + path,
            path.upper(),
            "/health/.." + path,
            f"/%{ord(path[1:2] or '/'):x}" + path[2:],
        )
        for spelling in spellings:
            if spelling == path:
                continue
            with server.connect() as connection:
                connection.sendall(f"{method} {spelling} HTTP/1.1\r\nHost: kit\r\nContent-Length: 0\r\n\r\n".encode())
                status = int(connection.recv(1 << 16).split()[1])
            same_path = spelling.startswith("/%") and path in OPEN
            assert status in ((200, 401) if same_path else (401, 404, 405)), (method, spelling, status)
    assert server.context.client.stats.steps_total == steps, "something ran"


WRONG = [
    *("", "Bearer", "bearer wrong", "Basic x", "Bearer é"),
    *(KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", f"Bearer {KEY} {OTHER}", f"Bearer{KEY}"),
]


@pytest.mark.parametrize("header", WRONG)
def test_a36_wrong_credentials(server: ScriptedServer, header: str):
    response = server.http.get("/v1/models", headers={"authorization": header.encode("latin-1")})
    assert response.status_code == 401 and response.headers["www-authenticate"].startswith("Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key" and response.headers["x-request-id"]
    assert KEY not in response.text


@pytest.mark.parametrize("header", [f"bearer {KEY}", f"Bearer {OTHER}", f"BEARER  {KEY}"])
def test_a36_right_credentials(server: ScriptedServer, header: str):
    assert server.http.get("/v1/models", headers={"authorization": header}).status_code == 200


def test_a36_other_origins_get_nothing(server: ScriptedServer):
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    preflight = server.http.options("/v1/chat/completions", headers=headers)
    assert preflight.status_code == 401 and not any(name.startswith("access-control") for name in preflight.headers)


def test_a36_keys_stay_out_of_the_log(server: ScriptedServer, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    for header in (f"Bearer {KEY}", f"Bearer {KEY}x"):
        server.http.get("/v1/models", headers={"authorization": header})
    server.http.post("/v1/chat/completions", content=b"{", headers={"authorization": f"Bearer {KEY}"})
    assert "/v1/models" in caplog.text and KEY not in caplog.text and KEY not in repr(server.settings)
    assert KEY not in server.http.get("/metrics").text


def test_metrics_behind_the_key():
    with ScriptedServer({"s1": b"A"}, api_key=(KEY,), protect_metrics=True) as server:
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/metrics", headers={"authorization": "Bearer x"}).status_code == 401
        assert server.http.get("/metrics/", headers={"authorization": "Bearer x"}).status_code == 401
        assert server.http.get("/health", headers={"authorization": "Bearer x"}).status_code == 200


def test_without_keys_everybody_is_the_same_nameless_caller():
    assert not Keyring(()).is_closed
    with ScriptedServer({"s1": b"A"}) as server:
        assert server.chat("s1")["choices"][0]["message"]["content"] == "A"


def test_tenants_are_digests():
    keyring = Keyring((KEY, OTHER))
    one, two = keyring.identify(f"Bearer {KEY}"), keyring.identify(f"Bearer {OTHER}")
    assert one and two and one.tenant != two.tenant and KEY not in str(one)
    assert keyring.identify("Bearer ") is None and keyring.identify(f"Bearer {KEY} ") == one
    assert keyring.identify(None) is None and keyring.identify("Bearer \udcff") is None


def test_a27_salts_are_tagged_by_kind():
    digest = "0" * 64
    assert cache_salt(None, None) is None
    salts = [
        cache_salt(digest, None),
        cache_salt(None, f"key={digest}"),
        cache_salt(digest, "a"),
        cache_salt(None, "a"),
    ]
    assert len(set(salts)) == 4


# ---------------------------------------------------------------------- the admin key
ADMIN = "octavo-admin-1"


def with_control_route(server: ScriptedServer) -> ScriptedServer:
    router = APIRouter(dependencies=[Depends(admin_only)])

    @router.post("/control_something")
    async def control() -> dict[str, str]:
        return {"done": "yes"}

    server.app.include_router(router)
    return server


SPELLINGS = [
    *("/control_something", "//control_something", "/control_something/", "/CONTROL_SOMETHING", "/control%5fsomething"),
    *("/%63ontrol_something", "/health/../control_something", "/llm/control_something", "/llm//control_something"),
    *("http://kit/control_something", "/control_something?x=/health", "/control_something#x", "/control_something;x"),
]


def status_of(server: ScriptedServer, target: str, key: str | None) -> int:
    credentials = f"Authorization: Bearer {key}\r\n" if key else ""
    with server.connect() as connection:
        head = f"POST {target} HTTP/1.1\r\nHost: kit\r\n{credentials}Content-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
        return int(connection.recv(1 << 16).split()[1])


@pytest.mark.parametrize("api_key", [(KEY,), ()])
def test_control_routes_need_the_admin_key_whatever_their_spelling(api_key: tuple[str, ...]):
    with with_control_route(ScriptedServer({}, api_key=api_key, admin_api_key=ADMIN, root_path="/llm")) as server:
        for spelling in SPELLINGS:
            with_admin = status_of(server, spelling, ADMIN)
            assert with_admin in (200, 400, 404), spelling
            for key, status in ((None, 401), ("wrong", 401), (KEY, 403 if api_key else 401)):
                assert status_of(server, spelling, key) in {status, *({with_admin} - {200})}, (spelling, key)
        assert status_of(server, "/llm/control_something", ADMIN) == status_of(server, SPELLINGS[0], ADMIN) == 200


@pytest.mark.parametrize("api_key", [(KEY,), ()])
def test_control_routes_are_closed_without_an_admin_key(api_key: tuple[str, ...]):
    """On loopback too: a proxy on this machine, or a page in a browser, comes from there."""
    with with_control_route(ScriptedServer({}, api_key=api_key)) as server:
        for header in (f"Bearer {KEY}", "Bearer", "Bearer None"):
            answer = server.http.post("/control_something", headers={"authorization": header})
            if header != f"Bearer {KEY}" and api_key:
                assert answer.status_code == 401
                continue
            error = assert_refused(answer, 403, code="admin_key_required")
            assert error["type"] == "permission_error" and "--admin-api-key" in error["message"]


def test_the_admin_key_opens_everything_else_too():
    with ScriptedServer({"s1": b"A"}, api_key=(KEY,), admin_api_key=ADMIN) as server:
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert server.http.get("/v1/models", headers=admin).status_code == 200
        assert server.post_chat("s1", headers=admin).status_code == 200
        assert server.http.get("/v1/models", headers={"authorization": f"Bearer {ADMIN}x"}).status_code == 401
    keyring = Keyring((KEY,), ADMIN)
    caller, admin_caller = keyring.identify(f"Bearer {KEY}"), keyring.identify(f"Bearer {ADMIN}")
    assert caller and admin_caller and not caller.is_admin and admin_caller.is_admin
    assert caller.tenant != admin_caller.tenant


def test_the_admin_key_alone_closes_nothing_else():
    with ScriptedServer({"s1": b"A"}, admin_api_key=ADMIN) as server:
        assert server.chat("s1")["choices"][0]["message"]["content"] == "A"
