"""Several choices, several prompts, log-probabilities, and honest usage from the cache (A20, A22, A27, A28)."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from bytetok import EOS
from kit import ScriptedServer, endless

from server import translate

pytestmark = pytest.mark.usefixtures("idle_afterwards")
ENDS = [b"oneZ...", b"twotwotwo"]


def two_ends(index: int, position: int) -> int:
    return ENDS[index % 2][position] if position < len(ENDS[index % 2]) else EOS


def by_index(index: int, position: int) -> int:
    return ord("A") + index if position < 4 else EOS


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    scripts = {"s1": b"ABCDEFGHIJKL", "emoji": "👍é".encode(), "long": endless, "pair": two_ends, "each": by_index}
    with ScriptedServer(scripts) as server:
        yield server


# ---------------------------------------------------------------------- A22
def test_a22_choices_of_a_chat(server: ScriptedServer):
    answer = server.chat("each", n=3, temperature=1, max_tokens=20)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["AAAA", "BBBB", "CCCC"]
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens"] == server.chat("each")["usage"]["prompt_tokens"], "the prompt counts once"


@pytest.mark.parametrize("slowly", [False, True])
def test_a22_choices_of_a_stream(server: ScriptedServer, slowly: bool):
    def ask():
        return server.stream_chat("each", n=3, max_tokens=20, stream_options={"include_usage": True})

    stream = server.in_slow_motion(ask) if slowly else ask()
    for index, text in enumerate(("AAAA", "BBBB", "CCCC")):
        choices = stream.choices(index)
        assert choices[0]["delta"]["role"] == "assistant" and stream.text(index) == text
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert sum(choice["finish_reason"] is not None for choice in choices) == 1
    assert {choice["index"] for choice in stream.choices()} == {0, 1, 2}
    assert stream.frames[-1]["usage"]["completion_tokens"] == 15


def test_a22_the_end_of_one_choice_is_not_the_others(server: ScriptedServer):
    answer = server.chat("pair", n=2, stop=["Z"], max_tokens=6)
    ends = {choice["message"]["content"]: choice["finish_reason"] for choice in answer["choices"]}
    assert ends == {"one": "stop", "twotwo": "length"}


def test_a22_shared_prompts_are_freed_once(server: ScriptedServer):
    for n in (1, 2, 8):
        server.chat("s1 " + "x" * 40, n=n)
        server.assert_idle()
    assert server.metric("octavo_kv_pages", state="active") == 0


def test_completions_of_several_prompts(server: ScriptedServer):
    answer = server.completion(["s1", "each"], n=2, max_tokens=3)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3] and texts == ["ABC", "ABC", "AAA", "BBB"]
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12
    ids = server.completion([[*b"s1"], [*b"each"]], max_tokens=3, return_token_ids=True)
    assert [choice["text"] for choice in ids["choices"]] == ["ABC", "AAA"]
    assert [choice["prompt_token_ids"] for choice in ids["choices"]] == [[*b"s1"], [*b"each"]]
    stream = server.stream_completion(["s1", "each"], n=2, max_tokens=3, stream_options={"include_usage": True})
    assert [stream.text(index) for index in range(4)] == texts
    assert all(stream.finish(index) == "length" for index in range(4)) and stream.frames[-1]["choices"] == []


# ---------------------------------------------------------------------- A20
def strict(raw: str) -> Any:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    return json.loads(raw, parse_constant=refuse)


def test_a20_chat_logprobs(server: ScriptedServer):
    for top in (None, 0, 3):
        fields = {} if top is None else {"top_logprobs": top}
        answer = strict(server.post_chat("s1", logprobs=True, **fields).text)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        for entry in content:
            assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"} and entry["logprob"] <= 0
            tops = [each["logprob"] for each in entry["top_logprobs"]]
            assert len(tops) == (top or 0) and tops == sorted(tops, reverse=True)
            assert all(each.keys() == {"token", "logprob", "bytes"} for each in entry["top_logprobs"])
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "ABCDEFGHIJKL"


def test_a20_bytes_rebuild_characters_over_several_tokens(server: ScriptedServer):
    answer = server.chat("emoji", logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "👍é"
    assert content[0]["token"] == "\\xf0" and content[-1]["token"] == "<|end|>" and content[-1]["bytes"] == []


def test_a20_streams_have_the_same_logprobs(server: ScriptedServer):
    whole = server.chat("emoji", logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    for stream in (
        server.stream_chat("emoji", logprobs=True, top_logprobs=2),
        server.in_slow_motion(lambda: server.stream_chat("emoji", logprobs=True, top_logprobs=2)),
    ):
        pieces = [choice["logprobs"]["content"] for choice in stream.choices() if choice["logprobs"]]
        assert [entry for piece in pieces for entry in piece] == whole


def test_a20_refused_combinations(server: ScriptedServer):
    for fields in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": False, "top_logprobs": 1}):
        response = server.post_chat("s1", **fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == "top_logprobs"
    assert server.post_completion("s1", logprobs=21).status_code == 400


def test_a20_completion_logprobs_have_the_older_shape(server: ScriptedServer):
    logprobs = server.completion("s1", logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["A", "B", "C"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.125] * 3
    assert logprobs["top_logprobs"] == [{a: -0.125, b: -1.125} for a, b in ("AB", "BC", "CD")]
    zero = server.completion("s1", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert zero["top_logprobs"] == [{"A": -0.125}]
    offsets = server.completion("emoji", logprobs=1)["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 0, 0, 0, 1, 1, 2]


def test_a20_streamed_completion_offsets_run_on(server: ScriptedServer):
    stream = server.in_slow_motion(lambda: server.stream_completion("emoji", logprobs=1))
    parts = [choice["logprobs"] for choice in stream.choices()]
    whole = server.completion("emoji", logprobs=1)["choices"][0]["logprobs"]
    assert {key: [x for part in parts for x in part[key]] for key in whole} == whole


def test_a20_what_is_not_finite_never_reaches_json(server: ScriptedServer):
    for extra in ({"temperature": 0}, {"top_k": 1}, {"logit_bias": {"65": -100}}):
        answer = strict(server.post_chat("s1", logprobs=True, top_logprobs=5, **extra).text)
        for entry in answer["choices"][0]["logprobs"]["content"]:
            assert math.isfinite(entry["logprob"])


def test_a37_an_answer_has_room_for_so_many_logprobs(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(translate, "MAX_LOGPROBS", 100)
    fields = {"n": 2, "logprobs": True, "top_logprobs": 4}
    before = server.context.client.line.num_sent, server.metric("octavo_requests_finished_total", reason="rejected")
    for limit in ({"max_tokens": 11}, {"max_completion_tokens": 10**9}, {"min_tokens": 11}):
        refused = server.post_chat("long", **fields, **limit)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs", refused.text
        assert "has room for 100" in refused.json()["error"]["message"]
    refused = server.post_completion(["long", "s1"], n=2, logprobs=4, max_tokens=6)
    assert refused.status_code == 400 and "4 choices of 6 tokens" in refused.json()["error"]["message"]
    assert server.context.client.line.num_sent == before[0], "nothing was computed for them"
    assert server.metric("octavo_requests_finished_total", reason="rejected") == before[1] + 4
    assert server.post_chat("long", **fields, max_tokens=10).status_code == 200
    assert server.post_completion(["long", "s1"], n=2, logprobs=4, max_tokens=5).status_code == 200
    assert server.stream_chat("long", **fields, max_tokens=11).num_done == 1


def test_a37_the_window_counts_where_more_is_asked_for(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(translate, "MAX_LOGPROBS", 100)
    window = server.context.client.info.cache.max_model_len
    prompt = [*b"long", *[ord(" ")] * (window - 14)]
    answer = server.completion(prompt, logprobs=4, n=2, max_tokens=10**9)
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 10}])
def test_a37_without_a_limit_the_answer_ends_where_the_room_for_logprobs_does(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int]
):
    monkeypatch.setattr(translate, "MAX_LOGPROBS", 109)
    answer = server.chat("long", n=2, logprobs=True, top_logprobs=4, **fields)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 20
    assert server.chat("s1", logprobs=True)["choices"][0]["finish_reason"] == "stop"


# ---------------------------------------------------------------------- A28
def test_a28_cached_tokens(server: ScriptedServer):
    before = server.metric("vllm:prefix_cache_hits_total")
    cached = 0
    page = server.settings.block_size
    for length in (page - 1, page, page + 1, 2 * page, 5 * page):
        prompt = [*b"s1".rjust(length, str(length)[0].encode())]
        assert len(prompt) == length
        usages = []
        for run in (server.completion, server.completion, server.completion):
            answer = run(prompt)
            assert answer["choices"][0]["text"] == "ABCDEFGHIJKL" and answer["usage"]["prompt_tokens"] == length
            usages.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        stream = server.stream_completion(prompt, stream_options={"include_usage": True})
        usages.append(stream.frames[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert usages == [0, length - 1, length - 1, length - 1]
        cached += sum(usages)
    assert server.metric("vllm:prefix_cache_hits_total") - before == cached


def test_a28_the_cache_counts_once_for_n_choices(server: ScriptedServer):
    answer = server.chat("each fresh", n=3)
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] < answer["usage"]["prompt_tokens"]
    assert (
        server.chat("each fresh", n=3)["usage"]["prompt_tokens_details"]["cached_tokens"]
        == answer["usage"]["prompt_tokens"] - 1
    )


# ---------------------------------------------------------------------- A27
def cached(server: ScriptedServer, prompt: str, **fields: Any) -> int:
    return server.completion(prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a27_salts_share_nothing(server: ScriptedServer):
    prompt = "~salted prompt s1"
    assert cached(server, prompt, cache_salt="a") == 0
    assert cached(server, prompt, cache_salt="a") == len(prompt) - 1
    assert cached(server, prompt, cache_salt="b") == cached(server, prompt) == 0
    assert cached(server, prompt, cache_salt="b", n=2) == len(prompt) - 1


@pytest.mark.parametrize("sharing", ["key", "global"])
def test_a27_keys_share_only_where_that_is_asked_for(sharing: str):
    prompt = "private prompt s1"

    def ask(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return server.post_completion(prompt, headers=headers, **fields).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    with ScriptedServer({"s1": b"A"}, api_key=("one", "two"), cache_sharing=sharing) as server:
        assert ask("one") == 0 and ask("one") == len(prompt) - 1
        assert ask("two") == (0 if sharing == "key" else len(prompt) - 1)
        assert ask("two", cache_salt="x") == 0 and ask("two", cache_salt="x") == len(prompt) - 1
        assert ask("one", cache_salt="x") == (0 if sharing == "key" else len(prompt) - 1)


def test_a33_a_lone_request_larger_than_the_queue_is_served() -> None:
    with ScriptedServer({"alone": b"x"}, max_num_seqs=4, max_num_queued_reqs=2, max_num_queued_tokens=8) as server:
        answer = server.completion("alone in the queue", n=9, max_tokens=1)
        assert [choice["text"] for choice in answer["choices"]] == ["x"] * 9
