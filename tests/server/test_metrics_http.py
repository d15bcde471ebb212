"""A35: metrics one can trust, after a life of every kind of request."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from kit import ScriptedServer, endless, eventually
from prometheus_client.parser import text_string_to_metric_families

COUNTER_SUFFIXES = ("_total", "_count", "_sum", "_bucket")


def counters(seen: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {key: value for key, value in seen.items() if key[0].endswith(COUNTER_SUFFIXES)}


def test_a35_after_200_mixed_requests():
    scripts = {"s1": b"ABCDEFGH", "long": endless, "ill": b"ABC"}
    with ScriptedServer(scripts, num_blocks=40, window=120, max_num_queued_reqs=64) as server:
        server.executor.fail_after = {"ill": 2}
        server.chat("s1")
        server.assert_idle()
        before = server.metrics()
        scrapes, tokens, ends = [before], [], []
        one_scraper = threading.Lock()

        def one(number: int) -> None:
            kind = number % 10
            if kind == 0:
                with server.open_request(f"{number} long", stream=number % 20 == 0, n=2):
                    pass
                return
            if kind == 1:
                answer = server.post_completion("s1", temperature=number + 5)
            elif kind == 2:
                answer = server.post_completion(f"{number} ill")
            elif kind == 3:
                answer = server.post_completion(f"{number} s1", n=2)
            elif kind == 4:
                stream = server.stream_completion(f"{number} s1", stream_options={"include_usage": True})
                tokens.append(stream.frames[-1]["usage"]["completion_tokens"])
                return
            else:
                answer = server.post_completion(f"{number} long" + "x" * 20, max_tokens=60)
            if answer.status_code == 200:
                tokens.append(answer.json()["usage"]["completion_tokens"])
            ends.append(answer.status_code)
            if kind == 9:
                with one_scraper:
                    scrapes.append(server.metrics())

        server.executor.hold()
        with ThreadPoolExecutor(12) as pool:
            done = pool.map(one, range(200))
            eventually(lambda: server.context.client.num_open >= 12)  # so many at once that the pool is too small
            server.executor.allow(None)
            assert len(list(done)) == 200
        server.assert_idle()
        scrapes.append(after := server.metrics())

    assert after["vllm:kv_cache_usage_perc",] == before["vllm:kv_cache_usage_perc",] == 0
    assert all(0 <= scrape["vllm:kv_cache_usage_perc",] <= 1 for scrape in scrapes)
    assert after["vllm:num_requests_running",] == after["vllm:num_requests_waiting",] == 0
    for earlier, later in itertools.pairwise(scrapes):
        for key, value in counters(earlier).items():
            assert later[key] >= value, f"{key} went backwards"

    def delta(*key: str) -> float:
        return after.get(key, 0) - before.get(key, 0)

    by_reason = {
        r: delta("octavo_requests_finished_total", f"reason={r}")
        for r in ("stop", "length", "abort", "error", "rejected")
    }
    assert sum(by_reason.values()) == 200, by_reason
    assert by_reason["rejected"] == ends.count(400) == 20 and by_reason["error"] == ends.count(500) == 20
    assert delta("vllm:num_preemptions_total") > 0, "the pool was never short"
    assert delta("octavo_kv_evictions_total", "reason=allocation") > 0


def test_a35_pages_add_up_from_the_first_scrape():
    loads = threading.Event()
    with ScriptedServer({}, num_blocks=40, loads=loads) as server:
        assert server.metric("octavo_kv_pool_pages") == 0, "there is no pool before the model is loaded"
        loads.set()
        eventually(lambda: server.http.get("/ready").status_code == 200)
        seen = server.metrics()
        assert seen["octavo_kv_pool_pages",] == seen["octavo_kv_pages", "state=free"] == 40
        assert seen["octavo_kv_pages", "state=active"] == seen["octavo_kv_pages", "state=cached"] == 0


def test_a35_generated_tokens_are_what_usage_says():
    with ScriptedServer({"s1": b"ABCDEFGH", "long": endless}) as server:
        answers = [server.completion("s1"), server.completion("s1", stop="DE"), server.completion("s1", n=3)]
        answers.append(server.chat("long", max_tokens=5))
        expected = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert (
            server.metric("vllm:generation_tokens_total") == server.metric("octavo_generated_tokens_total") == expected
        )
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        assert server.metric("vllm:prompt_tokens_cached_total") >= cached > 0


def test_a35_the_exposition_is_well_formed():
    with ScriptedServer({"s1": b"A"}, served_model_name=('a "quoted"\nname\\',)) as server:
        assert server.http.post("/v1/completions", json={"prompt": "s1"}).status_code == 200
        text = server.http.get("/metrics").text
        families = list(text_string_to_metric_families(text))
        assert all(family.documentation and family.type != "unknown" for family in families)
        names = {sample.labels["model_name"] for f in families for sample in f.samples if "model_name" in sample.labels}
        assert names == {'a "quoted"\nname\\'}
        for family in families:
            if family.type == "histogram":
                assert any(sample.labels.get("le") == "+Inf" for sample in family.samples), family.name
        labels = {label for family in families for sample in family.samples for label in sample.labels}
        assert not labels & {"user", "key", "request_id", "prompt", "path"}


def test_a35_metrics_that_fail_harm_nobody(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    with ScriptedServer({"s1": b"ABC"}) as server:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("a metric has failed")

        for name in ("first_token", "inter_token", "published", "finished", "step"):
            monkeypatch.setattr(server.context.metrics, name, broken)
        assert server.completion("s1")["choices"][0]["text"] == "ABC"
        assert "a metric has failed" in caplog.text
        monkeypatch.undo()
        server.assert_idle()


def test_http_metrics_carry_route_templates():
    with ScriptedServer({"s1": b"A"}) as server:
        server.completion("s1")
        for path in ("/v1/models/x/y", "/v1/nothing", "/nothing/else", "/health"):
            server.http.get(path)
        seen = server.metrics()
        http = {key[1:]: value for key, value in seen.items() if key[0] == "http_requests_total"}
        assert http == {
            ("handler=/v1/completions", "method=POST", "status=2xx"): 1,
            ("handler=/v1/models/{model:path}", "method=GET", "status=4xx"): 1,
            ("handler=none", "method=GET", "status=4xx"): 2,
        }


def test_openmetrics_over_http():
    with ScriptedServer({"s1": b"A"}) as server:
        answer = httpx2.get(
            f"http://127.0.0.1:{server.port}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
        assert answer.headers["content-type"].startswith("application/openmetrics-text") and answer.text.endswith(
            "# EOF\n"
        )
