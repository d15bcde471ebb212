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


def test_a_request_is_aborted_by_the_id_its_client_knows(server: ScriptedServer):
    answers = []
    ids = ({"x-request-id": "mine"}, {"x-request-id": "other"})
    threads = [
        threading.Thread(target=lambda h=h: answers.append(server.http.post(
            "/v1/completions", json={"prompt": "long", "max_tokens": 400, "ignore_eos": True}, headers=h,
        )))
        for h in ids
    ]  # fmt: skip
    server.executor.hold()
    for thread in threads:
        thread.start()
    server.step_until(lambda: server.context.client.stats.running == 2)
    assert server.http.get("/load", headers=ADMIN).json() == {"server_load": 2}
    ask = {"request_ids": ["cmpl-mine", "unknown"]}
    assert server.http.post("/abort_requests", json=ask, headers=ADMIN).json() == {"aborted_sequences": 1}
    eventually(lambda: len(answers) == 1)
    assert answers[0].status_code == 500 and "operator" in answers[0].json()["error"]["message"]
    server.executor.allow(None)
    for thread in threads:
        thread.join()
    assert answers[1].status_code == 200


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
