"""The API process's side of the engine: what breaks there breaks one request, or says so."""

import threading
import time

import pytest
from kit import ScriptedServer, eventually, receive_until

from engine.client import EngineClient
from engine.text.output_processor import OutputProcessor
from engine.throughput import Throughput


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
        for reason, count in {"error": 1, "stop": 1, "abort": 0}.items():
            assert server.metric("octavo_requests_finished_total", reason=reason) == count
            assert server.metric("vllm:request_success_total", finished_reason=reason) == count


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
    throughput = Throughput(lambda: now)
    assert throughput.seconds_for(10, 5, 0.1) == 1.0
    for _ in range(20):
        now += 0.5
        throughput.finished()
    assert throughput.seconds_for(10, 5, 100.0) == pytest.approx(4.75)
    assert throughput.seconds_for(10**6, 5, 100.0) == 120.0
    now += 3600
    assert throughput.seconds_for(10, 5, 0.1) == 1.0


def test_retry_after_before_anything_was_finished():
    throughput = Throughput(lambda: 1000.0)
    for _ in range(2):
        assert throughput.seconds_for(2, 8, 15.0) == 15.0, "a seat is free no sooner"
        assert throughput.seconds_for(16, 8, 15.0) == 30.0
        assert throughput.seconds_for(1, 0, 15.0) == 15.0, "the engine has yet to say how many run"
        assert throughput.seconds_for(16, 8, 1000.0) == 120.0
        throughput.finished()  # one alone has no rate


def test_the_watchdog_counts_only_what_it_was_awake_for():
    """A process that was stopped, or busy, has not listened: the engine's words wait in the socket."""
    with ScriptedServer({"s1": b"ABCDEF"}, watchdog_timeout=0.4) as server:
        server.executor.hold()
        with server.open_request("s1", max_tokens=3) as connection:
            eventually(lambda: server.context.client.num_open == 1)
            assert server.loop is not None
            asleep = threading.Event()
            server.loop.call_soon_threadsafe(lambda: (asleep.set(), time.sleep(1.5)))  # as SIGSTOP would do
            assert asleep.wait(20)
            server.executor.allow(None)  # the engine answers meanwhile
            assert b'"ABC"' in receive_until(connection, b"}}}")
        assert server.http.get("/health").status_code == 200
        server.assert_idle()
