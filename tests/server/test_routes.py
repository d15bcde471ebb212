"""Routes other than the two that generate, and request ids on all of them."""

from collections.abc import Iterator

import pytest
from kit import MODEL, ScriptedServer, endless, eventually, user
from refusals import assert_refused

from server.limits import HTTPLimits

pytestmark = pytest.mark.usefixtures("idle_afterwards")
WINDOW = 128


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL"}, window=WINDOW) as server:
        yield server


def test_tokenize_and_detokenize(server: ScriptedServer):
    answer = server.http.post("/tokenize", json={"model": MODEL, "prompt": "hé", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": WINDOW, "tokens": [*"hé".encode()], "token_strs": ["h", "�", "�"]}
    assert server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    chat = server.http.post("/tokenize", json={"messages": [user("s1")]}).json()
    server.chat("s1")
    assert chat["tokens"] == server.executor.prompts[-1] and chat["token_strs"] is None
    assert_refused(server.http.post("/tokenize", json={}), param="prompt")
    assert_refused(server.http.post("/tokenize", json={"model": "nope", "prompt": "x"}), 404)
    assert_refused(server.http.post("/detokenize", json={"tokens": [10**6]}), param="tokens")
    assert_refused(server.http.post("/tokenize", json={"messages": [user("x")], "chat_template": "x"}))


def test_models(server: ScriptedServer):
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["id"] == MODEL and card["object"] == "model" and card["max_model_len"] == WINDOW
    assert server.http.get(f"/v1/models/{MODEL}").json() == card


@pytest.mark.parametrize("path", ["/health", "/ready", "/readyz", "/live", "/livez", "/ping", "/v1/models"])
def test_head_is_get_without_a_body(server: ScriptedServer, path: str):
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")


def test_request_ids_go_in_and_out(server: ScriptedServer):
    assert server.post_chat("s1", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("x" * 129, "a b", "é".encode().decode("latin-1")):
        answered = server.http.get("/v1/nothing", headers={"x-request-id": bad.encode("latin-1")}).headers[
            "x-request-id"
        ]
        assert answered != bad and len(answered) == 32
    named = server.post_chat("s1", request_id="mine-2")
    assert named.json()["id"] == "chatcmpl-mine-2" and named.headers["x-request-id"] == "mine-2"
    both = server.post_chat("s1", request_id="mine-2", headers={"x-request-id": "mine-4"})
    assert both.json()["id"] == "chatcmpl-mine-4" and both.headers["x-request-id"] == "mine-4"
    replaced = server.post_chat("s1", request_id="mine-2", headers={"x-request-id": "a b"})
    assert replaced.json()["id"] == "chatcmpl-mine-2" and replaced.headers["x-request-id"] == "mine-2"
    assert server.stream_chat("s1", request_id="mine-5").response.headers["x-request-id"] == "mine-5"
    answer = server.post_completion("traced s1", headers={"x-request-id": "mine-3"})
    assert answer.json()["id"] == "cmpl-mine-3"
    events = server.http.get("/debug/kv").json()["events"]
    assert any(str(event["request_id"]).startswith("mine-3~") for event in events), "the events tell whose they are"
    assert server.stream_chat("s1").response.headers["x-request-id"]


@pytest.mark.parametrize("value", ["x" * 129, "x" * 1000, "é", "a\nb", "a b", "", "a~b"])
def test_what_is_no_request_id(server: ScriptedServer, value: str):
    for response in (server.post_chat("s1", request_id=value), server.post_completion("s1", request_id=value)):
        error = assert_refused(response, param="request_id", code="invalid_value")
        limit = "1 to 128 characters out of A-Z a-z 0-9 . _ : @ + = / -"
        assert error["message"].startswith(f"request_id must be {limit}, got ")
    assert server.chat("s1", request_id="x" * 128)["id"] == "chatcmpl-" + "x" * 128


def test_openapi_and_version(server: ScriptedServer):
    document = server.http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert server.http.get("/version").json().keys() == {"version"}


def test_the_page_needs_nothing_from_elsewhere(server: ScriptedServer):
    page = server.http.get("/")
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'self'" in page.headers["content-security-policy"]
    )
    for path in ("/web/page.js", "/web/page.css"):
        assert f'"{path[1:]}"' in page.text and server.http.get(path).status_code == 200
    for path in ("/", "/web/page.js", "/web/page.css"):
        assert "http" not in server.http.get(path).text.replace("${location.origin}", ""), path


def test_debug_kv_has_the_figures_of_memory_stats(server: ScriptedServer):
    server.chat("s1")
    report = server.http.get("/debug/kv?events=5").json()
    assert {
        "total_pages", "used_pages", "cached_pages", "free_pages", "utilization", "slot_utilization",
        "active_requests", "bytes_per_page", "bytes_per_token", "total_bytes",
    } <= report.keys()  # fmt: skip
    assert report["total_pages"] == 256 and report["cache"]["block_size"] == 4 and report["cached_pages"] > 0
    assert 0 < len(report["events"]) <= 5 and all("kind" in event for event in report["events"])


def test_debug_kv_does_not_wait_for_an_engine_that_is_busy():
    limits = HTTPLimits(report_seconds=0.05)
    with ScriptedServer({"long": endless}, limits=limits) as server:
        server.executor.hold()
        with server.open_request("long", max_tokens=20, stream=True):
            eventually(lambda: server.http.get("/debug/kv").status_code == 503)  # the step has begun
            refused = server.http.get("/debug/kv")
            assert_refused(refused, 503, code="engine_not_ready")
            assert "retry-after" in refused.headers
            server.executor.allow(None)
