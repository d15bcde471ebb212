"""Clients that go away, engines that die, queues that fill, and a server that loads, drains and ends."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kit import MODEL, PATIENCE, ScriptedServer, Stream, endless, eventually, receive_until

from engine.errors import EngineDead
from server.limits import HTTPLimits
from server.metrics import Metrics
from server.streaming import EventStream

SCRIPTS = {"long": endless, "s1": b"ABCDEF", "ill": b"ABC"}


@pytest.fixture
def start() -> Iterator[Callable[..., ScriptedServer]]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(ScriptedServer(SCRIPTS, **options))


# ---------------------------------------------------------------------- A03
@pytest.mark.parametrize("stream", [True, False])
def test_a03_a_client_that_goes_away_ends_its_work(start, stream: bool):
    server = start(window=2000, num_blocks=1024)
    for n in (1, 1, 3):
        server.executor.hold()
        with server.open_request("long", stream=stream, n=n):
            server.step_until(lambda n=n: server.context.client.stats.running == n)
        eventually(lambda: server.context.client.num_open == 0)
        server.executor.allow(None)
        server.assert_idle()
    assert server.context.metrics.requests_finished == {"abort": 3}
    assert server.metric("octavo_requests_finished_total", reason="abort") == 3
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 5
    assert server.metric("octavo_client_disconnects_total") == 3
    assert server.chat("s1")["choices"][0]["finish_reason"] == "stop"


def test_a03_the_abort_comes_within_a_step(start):
    server = start(window=2000, num_blocks=1024)
    server.executor.hold()
    with server.open_request("long", stream=True) as connection:
        server.step()
        assert b"200 OK" in connection.recv(1 << 16)
    eventually(lambda: server.context.client.num_open == 0)  # while the engine stands still
    server.step()
    assert server.context.client.stats.running == 0


def test_a03_in_the_queue_and_in_the_middle_of_a_prefill(start):
    server = start(max_num_seqs=1, max_num_batched_tokens=16)
    server.executor.hold()
    with server.open_request("x" * 100 + "long"), server.open_request("long") as waiting:
        eventually(lambda: server.context.client.num_open == 2)
        server.step_until(lambda: server.context.client.stats.waiting == 1)
        waiting.close()
        eventually(lambda: server.context.client.num_open == 1)
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)
    server.assert_idle()


def test_a03_many_cancelled_requests_leak_nothing(start):
    server = start(num_blocks=64)
    server.executor.hold()
    for number in range(40):
        with server.open_request(f"{number} long", stream=number % 2 == 0):
            eventually(lambda: server.context.client.num_open > 0)
            server.step()
        eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)
    server.assert_idle()
    assert server.metric("octavo_requests_finished_total", reason="abort") == 40


def test_a03_several_prompts_are_one_request(start):
    server = start()
    server.executor.hold()
    with server.open_request(["a long", "b long", "s1"]):
        eventually(lambda: server.context.client.num_open == 3)
    eventually(lambda: server.context.client.num_open == 0)
    server.executor.allow(None)
    server.assert_idle()
    assert server.metric("octavo_requests_finished_total", reason="abort") == 1


def test_a_reader_that_stalls_is_given_up(start, caplog: pytest.LogCaptureFixture):
    """It has a window of a few kilobytes and reads nothing; what waits for it stays bounded, and then it is dropped."""
    caplog.set_level(logging.INFO)
    server = start(window=8000, num_blocks=2500, limits=HTTPLimits(stall_seconds=0.5), send_buffer=4096)
    body = json.dumps({"model": MODEL, "prompt": "long", "max_tokens": 7000, "stream": True, "logprobs": 5}).encode()

    def given_up() -> bool:
        return sum(server.context.metrics.requests_finished.values()) == 1

    server.executor.hold()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(server.head("POST", "/v1/completions", len(body)) + body)
        while not given_up():  # as many steps as that takes, on a machine of any speed
            server.step(given_up)
        server.executor.allow(None)
        server.assert_idle()
        left = 0
        while data := connection.recv(1 << 16):
            left += len(data)
        assert left < 1 << 16, "what the kernel had; closed in peace, the server would have kept its own buffer for it"
    [line] = [record.fields for record in caplog.records if record.name == "octavo.access"]
    assert line["status"] == 499 and not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert server.metric("octavo_requests_finished_total", reason="length") == 0
    assert server.metric("octavo_requests_finished_total", reason="abort") == 1
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 1


@pytest.mark.parametrize("last", ["http.response.start", "frame", "end"])
def test_a_reader_that_stalls_at_any_message(last: str):
    """Here the server is played: how much of an answer a real one's buffers hold cannot be chosen to the byte."""

    class NoGeneration:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"frame"

    async def stream() -> None:
        cut, generation = asyncio.Event(), NoGeneration()
        scope: dict[str, Any] = {"type": "http", "state": {"abort": cut.set}}

        async def receive() -> dict[str, Any]:
            await cut.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            kind = message.get("body", b"").decode() or ("end" if "body" in message else message["type"])
            if kind == last:
                await asyncio.Event().wait()

        await EventStream(generation, frames(), Metrics(), 0.05)(scope, receive, send)
        assert cut.is_set() and scope["state"]["given_up"] and generation.is_closed

    asyncio.run(asyncio.wait_for(stream(), PATIENCE))


# ---------------------------------------------------------------------- A07
def test_a07_an_engine_that_dies_fails_everything_at_once(start):
    server = start(max_num_seqs=2)
    server.executor.hold()
    with ThreadPoolExecutor(4) as pool:
        streaming = pool.submit(server.post_chat, "long", stream=True)
        eventually(lambda: server.context.client.num_open == 1)
        whole = pool.submit(server.post_chat, "long")
        eventually(lambda: server.context.client.num_open == 2)
        queued = pool.submit(server.post_chat, "long"), pool.submit(server.post_chat, "s1")
        eventually(lambda: server.context.client.num_open == 4)
        server.step_until(lambda: server.context.client.stats.waiting == 2)
        server.executor.fatal = RuntimeError("a bit has flipped")
        server.executor.allow(None)
        stream = Stream(streaming.result(), streaming.result().text)
        assert stream.frames[-1]["error"]["code"] == "engine_dead" and stream.raw.endswith("data: [DONE]\n\n")
        for failed in (whole.result(), *(each.result() for each in queued)):
            assert failed.status_code == 500 and failed.json()["error"]["code"] == "engine_dead"
            assert failed.headers["x-should-retry"] == "false"
    assert server.wait_engine_down() == 1
    assert server.http.get("/health").status_code == server.http.get("/livez").status_code == 503
    assert server.http.get("/readyz").json()["phase"] == "dead"
    refused = server.post_chat("s1")
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "engine_dead"
    assert server.http.get("/debug/kv").status_code == 500
    assert server.metric("octavo_engine_phase", phase="dead") == 1


def test_a07_the_end_of_the_engine_is_told_to_who_waits_for_it(start):
    server = start()
    assert server.loop is not None and server.context.client is not None
    ended = asyncio.run_coroutine_threadsafe(server.context.client.ended(), server.loop)
    server.chat("s1")
    assert not ended.done()
    server.executor.fatal = RuntimeError("a bit has flipped")
    assert server.post_chat("s1").status_code == 500
    ended.result(PATIENCE)
    asyncio.run_coroutine_threadsafe(server.context.client.ended(), server.loop).result(PATIENCE)  # also late ones


def test_a07_a_fault_of_one_request_fails_that_one(start):
    server = start()
    server.executor.fail_after = {"ill": 2}
    server.executor.hold()
    with ThreadPoolExecutor(2) as pool:
        ill, well = pool.submit(server.post_chat, "ill"), pool.submit(server.post_chat, "s1")
        eventually(lambda: server.context.client.num_open == 2)
        server.executor.allow(None)
        assert ill.result().status_code == 500 and ill.result().json()["error"]["code"] == "request_failed"
        assert well.result().json()["choices"][0]["message"]["content"] == "ABCDEF"
    server.assert_idle()
    for reason, count in {"error": 1, "stop": 1, "abort": 0}.items():
        assert server.metric("octavo_requests_finished_total", reason=reason) == count
        assert server.metric("vllm:request_success_total", finished_reason=reason) == count


def test_a07_a_step_that_never_ends_is_noticed(start):
    server = start(watchdog_timeout=0.3)
    server.executor.hold()
    response = server.post_chat("long")
    assert response.status_code == 500 and "has not answered" in response.json()["error"]["message"]
    assert server.http.get("/health").status_code == 503


def test_a07_an_idle_engine_is_not_taken_for_dead(start):
    server = start(watchdog_timeout=0.2)
    threading.Event().wait(0.5)  # nothing happens for longer than the watchdog waits
    assert server.http.get("/health").status_code == 200
    assert server.chat("s1")["choices"][0]["finish_reason"] == "stop"


# ---------------------------------------------------------------------- A33
def test_a33_a_full_queue_refuses_at_once(start):
    server = start(max_num_seqs=2, max_num_queued_reqs=4, num_blocks=64)
    server.executor.hold()
    with ThreadPoolExecutor(8) as pool:
        accepted = [pool.submit(server.post_completion, f"{n} s1") for n in range(6)]
        eventually(lambda: server.context.client.num_open == 6)
        assert server.http.get("/readyz").json()["phase"] == "overloaded"
        assert server.http.get("/health").status_code == 200, "busy is not broken"
        for stream in (False, True):
            for n in (1, 3):
                refused = server.post_completion("s1", stream=stream, n=n)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
                assert 1 <= float(refused.headers["retry-after"]) <= 120
                assert float(refused.headers["retry-after-ms"]) >= 1000
        assert server.metric("octavo_requests_rejected_total", reason="max_num_queued_reqs") == 4
        assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 4
        assert server.metric("octavo_requests_finished_total", reason="rejected") == 4
        server.executor.allow(None)
        for each in accepted:
            assert each.result().json()["choices"][0]["text"] == "ABCDEF"
    server.assert_idle()
    assert server.http.get("/readyz").status_code == 200


def test_a33_n_choices_count_as_n(start):
    server = start(max_num_seqs=2, max_num_queued_reqs=4)
    server.executor.hold()
    with server.open_request("long"):
        eventually(lambda: server.context.client.num_open == 1)
        assert server.post_completion("s1", n=6).status_code == 503
    server.executor.allow(None)
    eventually(lambda: server.context.client.num_open == 0)
    server.wait_running(0)  # the engine has said so too: rows are free
    assert server.post_completion("s1", n=6).status_code == 200


def test_a33_a_bound_in_tokens(start):
    server = start(max_num_seqs=1, max_num_queued_tokens=100)
    server.executor.hold()
    with contextlib.ExitStack() as requests:
        for number, prompt in enumerate(("x" * 60 + "long", "y" * 60 + "s1"), 1):
            requests.enter_context(server.open_request(prompt))
            eventually(lambda number=number: server.context.client.num_open == number)
            server.step_until(lambda number=number: server.context.client.stats.received_total == number)
        refused = server.post_completion("z" * 60 + "s1")
        assert refused.status_code == 503 and "max-num-queued-tokens" in refused.json()["error"]["message"]
        server.executor.allow(None)


def test_a33_waiting_too_long_is_an_answer(start):
    server = start(max_num_seqs=1, queue_timeout=0.2)
    server.executor.hold()
    server.engine_ahead = -PATIENCE  # the first one has all the time it needs
    with server.open_request("long") as running, ThreadPoolExecutor(1) as pool:
        server.step_until(lambda: server.context.client.stats.running == 1)
        late = pool.submit(server.post_chat, "s1", stream=True)
        eventually(lambda: server.context.client.num_open == 2)
        threading.Event().wait(0.3)  # the queue's timeout passes while nothing moves
        server.engine_ahead = 0.0
        server.step_until(late.done)
        answer = late.result()
        running.close()
        server.executor.allow(None)
    assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
    assert server.metric("octavo_requests_rejected_total", reason="queue_timeout") == 1


@pytest.mark.parametrize("asked", [{"prompt": ["s1", "2 s1", "3 s1"]}, {"prompt": "s1", "n": 3}], ids=["prompts", "n"])
@pytest.mark.parametrize("caching", [True, False])
def test_a33_an_answer_that_is_being_made_waits_no_longer(start, asked, caching: bool):
    """The last of its prompts or choices may wait as long as the others take."""
    server = start(max_num_seqs=1, queue_timeout=PATIENCE, enable_prefix_caching=caching)
    server.executor.hold()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post_completion, headers={"x-stainless-read-timeout": str(PATIENCE)}, **asked)
        server.step_until(lambda: server.context.client.stats.running == 1)
        server.engine_ahead = 2 * PATIENCE  # both timeouts pass
        server.executor.allow(None)
        assert [choice["text"] for choice in answer.result().json()["choices"]] == ["ABCDEF"] * 3


def test_a33_several_prompts_are_taken_or_refused_together(start):
    """A lone request may be larger than the queue; beside another one it fits as a whole or is not begun."""
    server = start(max_num_seqs=1, max_num_queued_reqs=2)
    answer = server.completion(["s1", "s1", "s1"])
    assert [choice["text"] for choice in answer["choices"]] == ["ABCDEF"] * 3
    server.executor.hold()
    with server.open_request("long"):
        eventually(lambda: server.context.client.num_open == 1)
        server.step_until(lambda: server.context.client.stats.running == 1)
        sent = server.context.client.line.num_sent
        refused = server.post_completion(["s1", "s1", "s1"])
        assert refused.status_code == 503 and "3 sequences would wait" in refused.json()["error"]["message"]
        assert (server.context.client.line.num_sent, server.context.client.num_open) == (sent, 1), "none was submitted"
        assert server.metric("octavo_requests_rejected_total", reason="max_num_queued_reqs") == 1
        assert server.metric("octavo_requests_finished_total", reason="rejected") == 1
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 0
        with ThreadPoolExecutor(1) as pool:
            fits = pool.submit(server.completion, ["s1", "s1"])
            eventually(lambda: server.context.client.num_open == 3)
            server.executor.allow(None)
            assert len(fits.result()["choices"]) == 2
    server.assert_idle()


def test_a33_prompts_that_cannot_be_taken_stop_those_before_them(start):
    server = start()
    for bad in ([10**6], [65] * 1000, []):
        refused = server.post_completion([[*b"s1"], bad])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt.1"
    assert server.context.client.line.num_sent == 0


def test_reports_that_nobody_waits_for_are_forgotten(start):
    server = start(limits=HTTPLimits(report_seconds=0.05))
    client = server.context.client
    server.executor.hold()
    with server.open_request("long"):
        eventually(lambda: server.http.get("/debug/kv").status_code == 503)  # the step has begun
        assert client._queries == {}
        dying = asyncio.run_coroutine_threadsafe(client.kv_report(), server.loop)
        eventually(lambda: len(client._queries) == 1)
        server.executor.fatal = RuntimeError("a bit has flipped")
        server.executor.allow(None)
        with pytest.raises(EngineDead):
            dying.result(20)
        eventually(lambda: client._queries == {})


def test_a33_a_stream_in_the_queue_does_not_look_dead(start):
    server = start(max_num_seqs=1, sse_keep_alive_interval=0.05)
    server.executor.hold()
    body = {"model": MODEL, "prompt": "s1", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        text = ""
        for chunk in response.iter_text():
            text += chunk
            if text.count(": ping\n\n") == 3:
                server.executor.allow(None)
    stream = Stream(response, text)
    assert response.status_code == 200 and stream.text() == "ABCDEF" and len(stream.comments) >= 3


def test_a33_an_error_after_the_first_comment_is_a_frame(start):
    server = start(sse_keep_alive_interval=0.05)
    server.executor.fail_after = {"ill": 0}
    server.executor.hold()
    with server.open_request("ill", stream=True) as connection:
        receive_until(connection, b": ping\n\n")
        server.executor.allow(None)
        received = receive_until(connection, b"[DONE]")
    assert b'data: {"error":{' in received and b'"request_failed"' in received


def test_the_openai_clients_timeout_is_a_deadline(start):
    server = start(max_num_seqs=1)
    server.executor.hold()
    with server.open_request("long") as running, ThreadPoolExecutor(1) as pool:
        late = pool.submit(server.post_chat, "s1", headers={"x-stainless-read-timeout": "0.2"})
        eventually(lambda: server.context.client.num_open == 2)
        server.step()
        threading.Event().wait(0.3)  # the client's patience ends while nothing moves
        server.step_until(late.done)
        assert late.result().status_code == 503
        running.close()
        server.executor.allow(None)


# ---------------------------------------------------------------------- A39
def test_a39_loading(start):
    loads = threading.Event()
    server = start(loads=loads)
    assert server.http.get("/livez").status_code == server.http.get("/health").status_code == 200
    eventually(lambda: server.http.get("/readyz").json().get("detail") == "loading weights")
    ready = server.http.get("/readyz")
    assert ready.status_code == 503 and ready.json()["phase"] == "loading" and ready.json()["progress"] == 0.5
    assert ready.json()["error"]["code"] == "engine_not_ready"
    refused = server.post_chat("s1")
    assert refused.status_code == 503 and refused.headers["retry-after"] and "loading" in refused.text
    assert server.http.get("/debug/kv").status_code == 503
    assert server.http.get("/metrics").status_code == 200
    assert server.metric("octavo_requests_rejected_total", reason="loading") == 1
    loads.set()
    eventually(lambda: server.http.get("/readyz").status_code == 200)
    assert server.chat("s1")["choices"][0]["finish_reason"] == "stop"


def test_a39_before_there_is_a_client(start):
    server = start()
    client, server.context.client = server.context.client, None
    try:
        assert server.http.get("/health").status_code == 200 and server.http.get("/readyz").json()["phase"] == "loading"
        for refused in (server.post_chat("s1"), server.http.get("/v1/models"), server.http.post("/tokenize", json={})):
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_not_ready"
    finally:
        server.context.client = client


def drain(server: ScriptedServer, seconds: float) -> "asyncio.Future[None]":
    return asyncio.run_coroutine_threadsafe(server.context.client.drain(seconds), server.loop)


def test_a39_draining_finishes_what_runs_and_takes_nothing_new(start):
    server = start()
    server.executor.hold()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.stream_completion, "long", max_tokens=40)
        eventually(lambda: server.context.client.num_open == 1)
        drained = drain(server, 20)
        eventually(lambda: server.http.get("/readyz").json()["phase"] == "draining")
        refused = server.post_chat("s1")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.http.get("/health").status_code == 200
        server.executor.allow(None)
        stream = running.result()
        assert stream.finish() == "length" and len(stream.text()) == 40 and stream.num_done == 1
        drained.result(20)


def test_a39_the_drain_has_an_end(start):
    server = start()
    server.executor.hold()
    with ThreadPoolExecutor(2) as pool:
        stream, whole = pool.submit(server.post_chat, "long", stream=True), pool.submit(server.post_chat, "long")
        eventually(lambda: server.context.client.num_open == 2)
        server.step_until(lambda: server.context.client.stats.running == 2)
        server.step()
        drain(server, 0.1).result(20)
        ended = Stream(stream.result(), stream.result().text)
        assert "error" in ended.frames[-1] and ended.raw.endswith("data: [DONE]\n\n")
        assert whole.result().status_code in (500, 503)
        assert server.metric("octavo_requests_finished_total", reason="abort") == 2
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
        server.executor.allow(None)
