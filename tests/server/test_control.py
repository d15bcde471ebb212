"""Control routes: what the admin key opens, and nothing else does."""

import threading

import pytest
from kit import ScriptedServer, endless, eventually
from refusals import assert_refused

ADMIN = {"authorization": "Bearer admin"}
ROUTES = [("POST", "/abort_requests"), ("POST", "/reset_prefix_cache"), ("GET", "/load"), ("GET", "/server_info")]


@pytest.fixture
def server():
    with ScriptedServer({"s1": b"ABCDEF", "long": endless}, api_key="user", admin_api_key="admin") as server:
        yield server
        server.assert_idle()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_the_admin_key_opens_them(server: ScriptedServer, method: str, path: str):
    if method == "GET":
        assert server.http.head(path).status_code == 403
    assert server.http.request(method, path).status_code == 403
    assert server.http.request(method, path, headers={"authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_an_admin_key_nobody_gets_in(method: str, path: str):
    with ScriptedServer({"s1": b"A"}) as server:
        assert server.http.request(method, path).status_code == 403


@pytest.mark.parametrize(
    ("header", "own", "known"),
    [
        ("mine", None, "cmpl-mine"),
        ("mine", None, "mine"),
        (None, "mine", "mine"),
        ("mine", "his", "mine"),
        ("cmpl-mine", None, "cmpl-mine"),
        ("cmpl-mine", None, "cmpl-cmpl-mine"),
    ],
)
def test_a_request_is_aborted_by_the_id_its_client_knows(
    server: ScriptedServer, header: str | None, own: str | None, known: str
):
    answers = []
    body = {"prompt": "long", "max_tokens": 400, "ignore_eos": True}
    asked = [(header, own), ("other", None)]
    threads = [
        threading.Thread(target=lambda name=name, own=own: answers.append(server.http.post(
            "/v1/completions", json=body | {"request_id": own}, headers={"x-request-id": name} if name else {},
        )))
        for name, own in asked
    ]  # fmt: skip
    server.executor.hold()
    for thread in threads:
        thread.start()
    server.step_until(lambda: server.context.client.stats.running == 2)
    assert server.http.get("/load", headers=ADMIN).json() == {"server_load": 2}
    ask = {"request_ids": [known, "unknown"]}
    assert server.http.post("/abort_requests", json=ask, headers=ADMIN).json() == {"aborted_sequences": 1}
    eventually(lambda: len(answers) == 1)
    assert answers[0].status_code == 500 and "operator" in answers[0].json()["error"]["message"]
    assert answers[0].headers["x-request-id"] == (header or own)
    server.executor.allow(None)
    for thread in threads:
        thread.join()
    assert answers[1].status_code == 200


def test_what_an_operator_ends_is_counted_as_aborted(server: ScriptedServer):
    """Of requests and of sequences, streamed or whole."""
    body = {"prompt": ["long", "longer"], "n": 2, "max_tokens": 400, "ignore_eos": True}
    answers = []
    threads = [
        threading.Thread(target=lambda stream=stream: answers.append(server.http.post(
            "/v1/completions", json=body | {"request_id": f"r-{stream}", "stream": stream},
        )))
        for stream in (True, False)
    ]  # fmt: skip
    server.executor.hold()
    for thread in threads:
        thread.start()
    server.step_until(lambda: server.context.client.stats.running == 8)
    ask = {"request_ids": ["r-True", "r-False"]}
    assert server.http.post("/abort_requests", json=ask, headers=ADMIN).json() == {"aborted_sequences": 8}
    for thread in threads:
        thread.join()
    server.executor.allow(None)
    ends = ("stop", "length", "abort", "error")
    assert [server.metric("octavo_requests_finished_total", reason=end) for end in ends] == [0, 0, 2, 0]
    assert [server.metric("vllm:request_success_total", finished_reason=end) for end in ends] == [0, 0, 8, 0]


def test_the_cache_is_emptied(server: ScriptedServer):
    def cached() -> int:
        return server.completion("abcds1")["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 and cached() >= 4
    evicted = server.http.post("/reset_prefix_cache", headers=ADMIN).json()["evicted_pages"]
    assert evicted > 0
    eventually(lambda: server.metric("octavo_kv_pages", state="cached") == 0)
    assert server.metric("octavo_kv_evictions_total", reason="reset") == evicted
    assert cached() == 0


def test_server_info_tells_no_key(server: ScriptedServer):
    info = server.http.get("/server_info", headers=ADMIN)
    assert info.json()["settings"]["max_num_seqs"] == 8 and "user" not in info.text and '"admin' not in info.text
    assert_refused(server.http.post("/abort_requests", json={"request_ids": []}, headers=ADMIN), param="request_ids")
