"""What operators read: a line a request, a line of throughput; never text, never keys."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from kit import PATIENCE, ScriptedServer, endless, eventually, receive_until

from engine.logs import JSONLines, Text
from engine.messages import RequestSummary, Stats, Timings
from server.logs import MAX_REMEMBERED, RequestLog, request_of, throughput_fields, throughput_words
from server.metrics import Metrics

KEY, ADMIN, SECRET_TEXT = "octavo-secret-key", "octavo-admin-key", "the-prompt-nobody-may-read"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    scripts = {"s1": b"ANSWER-NOBODY-MAY-READ", "long": endless, "ends": b"AB"}
    with ScriptedServer(scripts, api_key=(KEY,), admin_api_key=ADMIN, log_level="debug") as server:
        yield server


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


def lines(log: pytest.LogCaptureFixture, count: int = 1) -> list[dict[str, Any]]:
    """Of the access log, as JSON has them. A line is written when its answer is out, perhaps a moment later."""
    eventually(lambda: len([r for r in log.records if r.name == "octavo.access"]) >= count)
    return [json.loads(JSONLines().format(record)) for record in log.records if record.name == "octavo.access"]


def words(log: pytest.LogCaptureFixture) -> str:
    return "\n".join(Text().format(record) for record in log.records if record.name == "octavo.access")


# ---------------------------------------------------------------------- a line a request
def test_a_finished_request(server: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    prompt = "0123456789 ends"
    for _ in range(2):
        server.completion(prompt, headers={"x-request-id": "abc"}, max_tokens=9)
    first, second = lines(log, 2)
    assert first["message"].startswith("POST '/v1/completions' 200 ")
    expected = {
        "id": "abc", "method": "POST", "path": "/v1/completions", "route": "/v1/completions", "status": 200,
        "sequences": 1, "prompt_tokens": 15, "cached_tokens": 0, "generated_tokens": 3, "finish_reason": "stop",
        "preemptions": 0, "level": "info", "logger": "octavo.access",
    }  # fmt: skip
    assert expected.items() <= first.items() and first["engine_id"].startswith("abc~")
    assert {**expected, "cached_tokens": 14}.items() <= second.items()
    assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"] < PATIENCE
    text = words(log)
    assert "prompt=15 cached=0 generated=3 queue=0." in text and "finish=stop preemptions=0" in text


def test_a_stream_and_several_choices(server: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    server.stream_completion(["abcd ends", "efgh long"], n=2, max_tokens=7)
    [line] = lines(log)
    expected = {"sequences": 4, "prompt_tokens": 18, "cached_tokens": 0, "generated_tokens": 2 * 3 + 2 * 7}
    assert {**expected, "finish_reason": "length+stop"}.items() <= line.items()


def test_a_client_that_went_away(server: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    for stream, status in ((False, 499), (True, 200)):
        log.clear()
        server.executor.hold()
        with server.open_request("long", stream=stream) as connection:
            for _ in range(3):
                server.step()
            if stream:
                receive_until(connection, b"data: ")
        [line] = lines(log)
        server.executor.allow(None)
        assert (line["status"], line["finish_reason"]) == (status, "abort") and line["generated_tokens"] >= 1
    server.assert_idle()


def test_what_was_refused_and_what_generates_nothing(server: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    server.post_completion("s1", max_tokens=-1)
    server.http.get("/v1/models")
    server.http.get("/nothing/at/all")
    server.http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    server.http.get("/health")
    server.http.get("/metrics")
    seen = [(line["status"], line["route"]) for line in lines(log, 4)]
    assert seen == [(400, "/v1/completions"), (200, "/v1/models"), (404, "none"), (401, "none")]
    assert not any("prompt_tokens" in line for line in lines(log))


def test_what_the_page_asks_for_has_a_line_only_where_it_fails(
    server: ScriptedServer, log: pytest.LogCaptureFixture
) -> None:
    before = server.metric("http_requests_total", handler="/debug/kv", method="GET", status="2xx")
    assert server.http.get("/debug/kv").status_code == 200
    assert server.http.get("/debug/kv", headers={"authorization": "Bearer no"}).status_code == 401
    [line] = lines(log)
    assert (line["path"], line["status"]) == ("/debug/kv", 401)
    assert server.metric("http_requests_total", handler="/debug/kv", method="GET", status="2xx") == before + 1


def test_no_text_and_no_key_at_any_level(server: ScriptedServer, log: pytest.LogCaptureFixture) -> None:
    server.completion(f"{SECRET_TEXT} s1", user=SECRET_TEXT, cache_salt=SECRET_TEXT)
    server.stream_completion(f"{SECRET_TEXT} s1", stop=[SECRET_TEXT])
    server.post_completion(f"{SECRET_TEXT} s1", max_tokens=-1, unknown_field=SECRET_TEXT)
    server.http.post("/tokenize", json={"prompt": SECRET_TEXT})
    server.http.post(f"/tokenize?key={KEY}&text={SECRET_TEXT}", content=b"{" + SECRET_TEXT.encode())
    server.http.get("/v1/models", headers={"authorization": f"Bearer {ADMIN}"})
    lines(log, 6)
    records = [record for record in log.records if not record.name.startswith("http")]  # the test's own client
    whole = "".join(form.format(record) for record in records for form in (Text(), JSONLines()))
    for secret in (SECRET_TEXT, "ANSWER-NOBODY", KEY, ADMIN):
        assert secret not in whole, [line for line in whole.splitlines() if secret in line]


# ---------------------------------------------------------------------- bookkeeping
def summary(request_id: str, n: int = 1, **fields: Any) -> RequestSummary:
    values = {"prompt_tokens": 8, "cached_tokens": 0, "generated_tokens": 1, "max_tokens": 9, "num_preemptions": 0}
    return RequestSummary(request_id, n=n, finish_reason="stop", timings=Timings(1.0, 2.0, 3.0, 4.0), **values | fields)


@pytest.mark.parametrize("name", ["a~0011aabb", "a~0011aabb.3", "a~0011aabb-12", "a~0011aabb.3-12"])
def test_sequences_of_one_request(name: str) -> None:
    assert request_of(summary(name)) == "a~0011aabb"
    assert request_of(summary("x-1.y~0011aabb.3-1")) == "x-1.y~0011aabb"


def test_what_nobody_asks_for_does_not_pile_up() -> None:
    log = RequestLog(Metrics())
    for number in range(MAX_REMEMBERED + 10):
        log.finished(summary(f"{number}~00000000"))
    assert len(log._ended) == MAX_REMEMBERED


def test_the_observer_behind_it_sees_everything() -> None:
    metrics = Metrics()
    log = RequestLog(metrics)
    log.first_token(0.1)
    log.inter_token(0.1)
    log.published(3)
    log.rejected("draining")
    log.finished(summary("a~00000000"))
    assert metrics.generated_tokens == 3 and metrics.rejections["draining"] == 1
    assert metrics.sequences_finished["stop"] == 1
    assert sum(metrics.requests.first_token.counts) == sum(metrics.requests.inter_token.counts) == 1


# ---------------------------------------------------------------------- throughput
def test_throughput_is_what_happened_between_two_snapshots() -> None:
    before = Stats(prefill_tokens_total=100, generated_tokens_total=50, preemptions_total={"a": 1})
    now = Stats(
        running=3, waiting=2, pages_total=100, pages_active=25, prefix_queries_total=80, prefix_hits_total=20,
        prefill_tokens_total=160, generated_tokens_total=90, preemptions_total={"a": 2, "b": 4},
    )  # fmt: skip
    fields = throughput_fields(before, now, 10.0)
    assert fields == {
        "prompt_tokens_per_second": 6.0, "output_tokens_per_second": 4.0, "running": 3, "waiting": 2,
        "kv_usage": 0.25, "hit_rate": 0.25, "preemptions": 5,
    }  # fmt: skip
    assert throughput_words(fields) == (
        "prompt 6.0 tok/s, output 4.0 tok/s, running 3, waiting 2, KV usage 25.0%, prefix hits 25.0%, preemptions 5"
    )
    assert "prefix hits -, preemptions 0" in throughput_words(throughput_fields(Stats(), Stats(), 1.0))


def test_a_line_of_throughput_while_there_is_work(log: pytest.LogCaptureFixture) -> None:
    with ScriptedServer({"ends": b"AB"}) as server:
        line = server.context.log.throughput
        line.period = 0.05

        def written() -> list[logging.LogRecord]:
            return [record for record in log.records if record.name == "octavo.throughput"]

        server.completion("ends")
        eventually(lambda: bool(written()) and line._timer is None)
        assert sum(record.fields["output_tokens_per_second"] for record in written()) > 0  # type: ignore[attr-defined]
        before = len(written())
        server.http.get("/v1/models")
        assert line._timer is None, "an idle engine is silent"
        server.executor.hold()
        with server.open_request("ends"):
            server.step()
            eventually(lambda: len(written()) > before + 2)
            assert written()[-1].fields["running"] == 1, "a step that takes long is told of"  # type: ignore[attr-defined]
            server.executor.allow(None)
        eventually(lambda: line._timer is None)
