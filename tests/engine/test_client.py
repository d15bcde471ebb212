"""The API process's side of the engine: what breaks there breaks one request, or says so."""

import pytest
from kit import ScriptedServer, eventually

from engine.client import EngineClient, _Throughput
from engine.text.output_processor import OutputProcessor


def test_a_text_that_cannot_be_made_ends_its_own_request(monkeypatch: pytest.MonkeyPatch):
    push = OutputProcessor.push

    def broken(self, output):
        if output.token_ids == [ord("P")]:
            raise IndexError("a detokeniser's bug")
        return push(self, output)

    monkeypatch.setattr(OutputProcessor, "push", broken)
    with ScriptedServer({"s1": b"ABCDEF", "s2": b"xxP"}) as server:
        answer = server.post_completion("s2")
        assert answer.status_code == 500 and "text could not be made" in answer.json()["error"]["message"]
        assert server.completion("s1")["choices"][0]["text"] == "ABCDEF"
        server.assert_idle()


def test_a_client_that_cannot_read_any_more_is_dead_and_says_so(monkeypatch: pytest.MonkeyPatch):
    def broken(self, message):
        raise KeyError("a bug in the client")

    with ScriptedServer({"s1": b"ABCDEF"}) as server:
        monkeypatch.setattr(EngineClient, "_take_step", broken)
        assert server.post_completion("s1").status_code == 500
        eventually(lambda: server.http.get("/health").status_code == 503)
        answer = server.post_completion("s1")
        assert answer.status_code == 500 and "broke" in answer.json()["error"]["message"]


def test_retry_after_follows_what_was_finished_within_the_last_minute():
    now = 1000.0
    throughput = _Throughput(lambda: now)
    assert throughput.seconds_for(10) == 1.0
    for _ in range(20):
        now += 0.5
        throughput.finished()
    assert throughput.seconds_for(10) == pytest.approx(4.75)
    assert throughput.seconds_for(10**6) == 120.0
    now += 3600
    assert throughput.seconds_for(10) == 1.0
