"""What is refused, how, and that nobody else notices."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from bytetok import CHATML, byte_tokenizer
from kit import MODEL, ScriptedServer, endless, eventually, receive_until
from uvicorn.server import ServerState

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatRenderer
from server.http_protocol import BoundedHTTP
from server.limits import MEBIBYTE, HTTPLimits
from server.protocol.body import parse
from server.protocol.tokens import DetokenizeBody
from server.serving import http_config

BODY_LIMIT = MEBIBYTE
WINDOW = 128


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    limits = HTTPLimits(body_bytes=BODY_LIMIT, body_seconds=0.5)
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}, window=WINDOW, limits=limits) as server:
        yield server


@pytest.fixture(autouse=True)
def idle_afterwards(server: ScriptedServer) -> Iterator[None]:
    yield
    server.assert_idle()


@pytest.fixture
def bystander(server: ScriptedServer) -> Iterator[None]:
    """Another request, under way meanwhile, which must end well."""
    server.executor.hold()
    with server.open_request("long", max_tokens=20, stream=True) as connection:
        yield
        server.executor.allow(None)
        received = receive_until(connection, b"[DONE]")
    assert b'"finish_reason":"length"' in received and b"error" not in received


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assert_refused(response, status: int = 400, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str) and {"type", "param", "code"} <= error.keys()
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert "Traceback" not in response.text
    if param is not None:
        assert error["param"] is not None and error["param"].startswith(param), error
    if code is not None:
        assert error["code"] == code
    return error


# ---------------------------------------------------------------------- A08
def test_a08_token_ids_outside_the_vocabulary(server: ScriptedServer, bystander: None):
    size = server.tokenizer.vocab_size
    for body in (
        {"logit_bias": {str(size): 5}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"5": 1e9}},
        {"stop_token_ids": [size]},
        {"stop_token_ids": [-1]},
    ):
        [name] = body
        assert assert_refused(server.post_chat("s1", **body))["param"] == name
    assert_refused(server.post_completion([1, size]), param="prompt")
    assert_refused(server.post_completion([2**40]), param="prompt")
    assert_refused(server.post_completion([-1]), param="prompt")
    assert_refused(server.post_completion("s1", allowed_token_ids=[size]), param="allowed_token_ids")


def test_a08_the_last_id_of_the_vocabulary_is_fine(server: ScriptedServer):
    assert server.post_chat("s1", logit_bias={str(server.tokenizer.vocab_size - 1): -100}).status_code == 200


# ---------------------------------------------------------------------- A16
@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "nope"}, 404, "model_not_found", "model"),
        ({"messages": None}, 400, None, "messages"),
        ({"messages": "hi"}, 400, None, "messages"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, 400, None, "messages"),
        ({"temperature": "hot"}, 400, None, "temperature"),
        ({"temperature": 9}, 400, None, "temperature"),
        ({"top_p": 0}, 400, None, "top_p"),
        ({"stop": 5}, 400, None, "stop"),
        ({"stream_options": {"include_usage": "maybe"}}, 400, None, "stream_options.include_usage"),
        ({"max_completion_tokens": 0}, 400, None, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, None, "min_tokens"),
        ({"cache_salt": ""}, 400, None, "cache_salt"),
    ],
)
def test_a16_every_refusal_is_an_envelope(server: ScriptedServer, change, status: int, code, param: str):
    body = {"model": MODEL, "messages": [user("s1")], **change}
    assert_refused(server.http.post("/v1/chat/completions", json=body), status, param, code)


def test_a16_missing_fields_and_broken_bodies(server: ScriptedServer):
    post = server.http.post
    assert_refused(post("/v1/chat/completions", json={"model": MODEL}), 400, "messages", "missing_required_parameter")
    assert_refused(post("/v1/completions", json={"model": MODEL}), 400, "prompt")
    for raw in (b"{not json", b"", b"[]", b"null", b'{"messages": "\xff"}', b'{"model": "\\ud800"}'):
        assert_refused(post("/v1/chat/completions", content=raw))


def test_a16_routes_and_methods(server: ScriptedServer):
    assert_refused(server.http.get("/v1/nothing"), 404, code="unknown_url")
    assert_refused(server.http.get("/v1/models/nope/none"), 404, "model", "model_not_found")
    refused = server.http.delete("/v1/models")
    assert_refused(refused, 405)
    assert refused.headers["allow"] == "GET"
    assert_refused(server.http.get("/debug/kv?events=many"), 400, "events")
    assert_refused(server.http.get("/debug/kv?events=1000000"), 400, "events")


def test_a16_unknown_fields_are_ignored_and_null_is_absent(server: ScriptedServer):
    optional = server.app.openapi()["components"]["schemas"]["ChatBody"]["properties"].keys() - {"messages"}
    nothing = dict.fromkeys(optional)
    assert server.post_chat("s1", **nothing, surprise={"deep": [1]}).status_code == 200
    plain = dict.fromkeys(("max_tokens", "logprobs", "stop", "echo", "n", "best_of", "suffix", "stream"))
    assert server.post_completion("s1", **plain).status_code == 200


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_regex": "foo**"},
        {"guided_json": {}},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"store": True},
        {"web_search_options": {}},
        {"chat_template": "{% for a in range(10**9) %}x{% endfor %}"},
        {"use_beam_search": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_documented_fields_that_are_not_served_are_named(server: ScriptedServer, field: dict[str, Any]):
    for stream in (False, True):
        error = assert_refused(server.post_chat("s1", stream=stream, **field), param=next(iter(field)))
        assert error["code"] == "unsupported_parameter"


def test_completion_fields_that_are_not_served(server: ScriptedServer):
    for field in ({"suffix": "x"}, {"best_of": 2}, {"echo": True}, {"response_format": {"type": "json_object"}}):
        assert_refused(server.post_completion("s1", **field), param=next(iter(field)), code="unsupported_parameter")


def test_values_that_ask_for_nothing_are_accepted(server: ScriptedServer):
    assert server.post_chat(
        "s1", tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"], store=False,
        echo=False, parallel_tool_calls=True, prediction={"type": "content", "content": "x"}, user="u",
        metadata={"a": "b"}, service_tier="fast", verbosity="low", reasoning_effort="low", safety_identifier="s",
        prompt_cache_key="k",
    ).status_code == 200  # fmt: skip
    assert server.post_completion("s1", best_of=1, suffix="", n=1).status_code == 200


# ---------------------------------------------------------------------- A17
def test_a17_a_prompt_that_leaves_no_room(server: ScriptedServer):
    for stream in (False, True):
        for tokens in (WINDOW, WINDOW + 10):
            response = server.post_completion([ord("x")] * tokens, stream=stream)
            error = assert_refused(response, code="context_length_exceeded")
            assert error["message"].startswith(f"This model's maximum context length is {WINDOW} tokens.")
            assert str(tokens) in error["message"]


def test_a17_output_is_clamped_to_the_window(server: ScriptedServer):
    prompt = [*b"long", *[ord(" ")] * (WINDOW - 9)]
    for limit in (100, 2**63, 2**70):
        answer = server.completion(prompt, max_tokens=limit)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5 and answer["usage"]["total_tokens"] == WINDOW


def test_a17_a_chat_without_a_limit_runs_to_the_window(server: ScriptedServer):
    answer = server.chat("long")
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == WINDOW


def test_a17_the_prompt_is_never_shortened_unless_asked(server: ScriptedServer):
    prompt = [*b"0123456789 s1"]
    server.completion(prompt)
    assert server.executor.prompts[-1] == prompt
    assert server.completion(prompt, truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2
    assert server.executor.prompts[-1] == [*b"s1"]
    long = [ord("x")] * WINDOW + [*b"s1"]
    assert server.completion(long, truncate_prompt_tokens=-1, max_tokens=4)["usage"]["prompt_tokens"] == WINDOW - 4
    assert_refused(server.post_completion(prompt, truncate_prompt_tokens=0), param="truncate_prompt_tokens")


# ---------------------------------------------------------------------- A18
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}], ids=str)
def test_a18_histories_with_tool_calls(server: ScriptedServer, content: dict[str, Any]):
    answer = {**content, "role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    response = server.post_chat(messages=[user("q s1"), answer, result])
    assert response.status_code == 200, response.text
    prompt = server.tokenizer.decode(server.executor.prompts[-1], False)
    assert "None" not in prompt and "[{" not in prompt


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_a18_text_parts_for_every_role(server: ScriptedServer, role: str):
    """Parts are joined by a newline."""
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo s1"}]
    seen = []
    for content in (parts, "he\nllo s1"):
        messages = [{"role": role, "content": content}, user("s1")]
        assert server.post_chat(messages=messages).status_code == 200
        seen.append(server.executor.prompts[-1])
    assert seen[0] == seen[1]


def test_a18_odd_conversations_are_never_the_servers_fault(server: ScriptedServer):
    assert server.post_chat(messages=[user("a"), user("s1")]).status_code in (200, 400)
    assert_refused(server.post_chat(messages=[user([{"type": "input_audio"}])]), param="messages")
    assert_refused(server.post_chat(messages=[user([{"type": "text"}])]), param="messages")
    assert_refused(server.post_chat(messages=[user(None)]), param="messages")
    extras = {"refusal": None, "name": "bob", "annotations": [], "surprise": 1}
    assert server.post_chat(messages=[{**user("s1"), **extras}]).status_code == 200


def test_a18_what_a_template_raises_is_a_400():
    refusing = CHATML + "{% if messages|length > 1 %}{{ raise_exception('one message at a time') }}{% endif %}"
    with ScriptedServer({"s1": b"A"}) as server:
        server.context.client.model = type(server.context.client.model)(
            (MODEL,), server.tokenizer, ChatRenderer(byte_tokenizer(template=refusing)), {}
        )
        assert server.post_chat("s1").status_code == 200
        error = assert_refused(server.post_chat(messages=[user("s1"), user("s1")]), param="messages")
        assert "one message at a time" in error["message"]


def test_a38_template_arguments_cannot_shadow_the_servers(server: ScriptedServer):
    for arguments in ({"chat_template": "x"}, {"tokenize": True}, {"messages": []}, {"__class__": 1}):
        assert_refused(server.post_chat("s1", chat_template_kwargs=arguments), param="chat_template_kwargs")
    assert server.post_chat("s1", chat_template_kwargs={"enable_thinking": False}).status_code == 200


def test_an_unfinished_answer_can_be_continued(server: ScriptedServer):
    messages = [user("s1"), {"role": "assistant", "content": "Well, s1"}]
    server.chat("", messages=messages, continue_final_message=True)
    assert server.tokenizer.decode(server.executor.prompts[-1], False).endswith("Well, s1")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert_refused(server.post_chat(messages=messages, **both), param="continue_final_message")


# ---------------------------------------------------------------------- A23
def test_a23_limits_by_either_name(server: ScriptedServer):
    def tokens(**limit: int | None) -> int:
        return server.chat("long", **limit)["usage"]["completion_tokens"]

    assert tokens(max_completion_tokens=5) == 5
    assert tokens(max_tokens=5) == 5
    assert tokens(max_completion_tokens=5, max_tokens=9) == 5
    assert tokens(max_completion_tokens=None, max_tokens=9) == 9
    assert server.post_chat("s1", max_tokens=None).status_code == 200
    assert server.completion("long")["usage"]["completion_tokens"] == 16


# ---------------------------------------------------------------------- A37
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        {"n": 10**6},
        {"n": 0},
        {"n": -1},
        {"n": 2**70},
        {"top_logprobs": 10**5, "logprobs": True},
        {"max_tokens": 2**63},
        {"seed": 2**70},
        {"top_k": 2**70},
        {"priority": 2**70},
        {"stop": ["x"] * 10**5},
        {"stop": [5] * 10**5},
        {"stop": ["x" * 10**5]},
        {"bad_words": ["x"] * 10**5},
        {"logit_bias": {str(i): 1 for i in range(10**5)}},
        {"stop_token_ids": [1] * 10**5},
        {"messages": [user("x")] * 10**5},
        {"tools": [{"type": "function"}] * 10**4},
        {"request_id": "x" * 10**5},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a37_one_request_that_asks_for_everything(server: ScriptedServer, bystander: None, body: dict[str, Any]):
    server.executor.allow(200)
    response = server.post_chat(None, **{"messages": [user("s1")], **body})
    assert response.status_code in (200, 400, 413), response.text[:300]
    assert response.status_code == 200 or response.json()["error"]["message"]


def test_a37_prompt_arrays(server: ScriptedServer):
    assert_refused(server.post_completion([[1]] * 10**5), param="prompt")
    assert_refused(server.post_completion(["x"] * 10**4), param="prompt")
    assert_refused(server.post_completion(["s1"] * 100, n=100), param="n")
    assert_refused(server.post_completion([1, "x", [2]]), param="prompt")
    for empty in ("", [], [[]]):
        assert_refused(server.post_completion(empty), param="prompt")


@pytest.mark.parametrize("field", ["metadata", "surprise", "tools"])
def test_a37_deeply_nested_json_is_a_400(server: ScriptedServer, field: str):
    raw = json.dumps({"model": MODEL, "messages": [user("s1")]})[:-1] + f', "{field}": {DEEP}}}'
    assert_refused(server.http.post("/v1/chat/completions", content=raw.encode()), code="invalid_json")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a37_bodies_that_are_too_large(server: ScriptedServer, path: str):
    too_large = server.http.post(path, content=b" " * (BODY_LIMIT + 1))
    assert_refused(too_large, 413, code="request_too_large")
    assert server.http.get("/health").status_code == 200


def test_a37_endless_chunks(server: ScriptedServer):
    with server.connect() as connection:
        connection.sendall(server.head("POST", "/v1/completions"))
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(4 * BODY_LIMIT // 0x10000):
                connection.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has hung up
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_a37_a_slow_client_is_dropped(server: ScriptedServer, bystander: None):
    with server.connect() as connection:
        connection.sendall(server.head("POST", "/v1/completions", 1000) + b'{"prompt"')
        answer = b""
        while received := connection.recv(1 << 16):
            answer += received
    assert answer.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in answer


def test_a37_heads_that_are_too_large(server: ScriptedServer, bystander: None):
    for head in (
        b"GET /health HTTP/1.1\r\nHost: kit\r\nX: " + b"x" * (1 << 20),
        b"GET /health HTTP/1.1\r\nHost: kit\r\n" + b"X: y\r\n" * (1 << 17),
        b"GET /" + b"x" * (1 << 20),
    ):
        with server.connect() as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(head)
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 431 ") and b'"invalid_request_error"' in answer


def test_a37_a_head_that_does_not_come_is_not_waited_for(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedHTTP, "head_seconds", 0.1)
    for beginning in (b"", b"GET /health HTT"):
        with server.connect() as connection:
            connection.sendall(beginning)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ") and connection.recv(1) == b""


def test_a37_ordinary_heads_and_keep_alive_are_untouched(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BoundedHTTP, "head_seconds", 0.2)
    body = json.dumps({"model": MODEL, "prompt": "s1"}).encode().ljust(200_000)
    for _ in range(3):
        response = server.http.post("/v1/completions", content=body, headers={"x-large": "x" * 30_000})
        assert response.status_code == 200
        threading.Event().wait(0.1)  # the connection is idle for longer than a head may take


def test_a16_what_is_not_http_gets_an_envelope_too(server: ScriptedServer):
    for nonsense in (
        b"nonsense\r\n\r\n",
        b"GET /a b c HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ):
        with server.connect() as connection:
            connection.sendall(nonsense)
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


# ---------------------------------------------------------------------- other routes
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


def test_request_ids_go_in_and_out(server: ScriptedServer):
    assert server.post_chat("s1", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("x" * 129, "a b", "é".encode().decode("latin-1")):
        answered = server.http.get("/v1/nothing", headers={"x-request-id": bad.encode("latin-1")}).headers[
            "x-request-id"
        ]
        assert answered != bad and len(answered) == 32
    assert server.chat("s1", request_id="mine-2")["id"] == "chatcmpl-mine-2"
    answer = server.post_completion("traced s1", headers={"x-request-id": "mine-3"})
    assert answer.json()["id"] == "cmpl-mine-3"
    events = server.http.get("/debug/kv").json()["events"]
    assert any(str(event["request_id"]).startswith("mine-3~") for event in events), "the events tell whose they are"
    assert server.stream_chat("s1").response.headers["x-request-id"]


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
        assert path in page.text and server.http.get(path).status_code == 200
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


def test_a37_content_parts_are_bounded_over_all_messages(server: ScriptedServer):
    part = {"type": "text", "text": ""}
    two = [user([part] * 8193), user([part] * 8192)]
    assert_refused(server.post_chat(messages=two), param="messages", code="invalid_value")
    assert_refused(server.post_chat(messages=[user([part] * 16385)]), param="messages.0.content")


def test_a37_detokenize_takes_a_bounded_number_of_tokens(server: ScriptedServer):
    assert_refused(server.http.post("/detokenize", json={"tokens": [1, True]}), param="tokens")
    assert server.http.post("/detokenize", json={"tokens": [65] * 5000}).json() == {"prompt": "A" * 5000}
    assert_refused(server.http.post("/detokenize", json={"tokens": [65] * 5000 + [10**6]}), param="tokens")
    with pytest.raises(InvalidRequest, match="1048576"):
        parse(DetokenizeBody, b'{"tokens": [' + b",".join([b"1"] * ((1 << 20) + 1)) + b"]}")


def test_a11_a_text_that_cannot_fit_is_not_tokenised(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.text.tokenizer._encode", None)
    text = "x" * (20 * WINDOW)
    for response in (server.post_completion(text), server.post_completion(["s1", text][1:])):
        error = assert_refused(response, code="context_length_exceeded")
        assert "at least" in error["message"]
    assert_refused(server.post_chat(text), code="context_length_exceeded")


def test_a11_a_long_text_may_be_truncated_or_counted(server: ScriptedServer):
    text = "x" * (20 * WINDOW) + " s1"
    assert server.post_completion(text, truncate_prompt_tokens=8).status_code == 200
    assert server.http.post("/tokenize", json={"prompt": text}).json()["count"] == len(text)


def test_a16_booleans_and_strings_are_not_numbers(server: ScriptedServer):
    for body in ({"max_tokens": True}, {"n": "2"}, {"stop_token_ids": [True]}, {"logprobs": True}):
        [name] = body
        assert_refused(server.post_completion("s1", **body), param=name)
    assert_refused(server.post_completion([True, False]), param="prompt")


def test_min_tokens_raises_the_default_of_max_tokens(server: ScriptedServer):
    assert server.completion("long", min_tokens=20)["usage"]["completion_tokens"] == 20
    assert server.completion("long", min_tokens=2)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", ["/health", "/ready", "/readyz", "/live", "/livez", "/ping", "/v1/models"])
def test_head_is_get_without_a_body(server: ScriptedServer, path: str):
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")


def test_a16_paths_are_dotted_and_names_short(server: ScriptedServer):
    image = user([{"type": "text", "text": "x"}, {"type": "y" * 1000}])
    error = assert_refused(server.post_chat(messages=[image]))
    assert error["param"] == "messages.0.content.1" and len(error["message"]) < 300
    both = server.post_chat("s1", add_generation_prompt=True, continue_final_message=True)
    assert_refused(both, param="continue_final_message", code="invalid_value")
    unknown = assert_refused(server.post_chat("s1", model="z" * 1000), 404, "model")
    assert "z" * 99 + "…" in unknown["message"] and "z" * 100 not in unknown["message"]


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


class Recorder(asyncio.Transport):
    """What a protocol writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._closing = b"", False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True


def test_a37_a_whole_head_in_one_read_is_bounded_too(server: ScriptedServer):
    loop = asyncio.new_event_loop()
    try:
        long = b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nX: " + b"y" * 40_000
        for head in (long, b"GET / HTTP/1.1" + b"\r\nX: y" * 20_000):
            config = http_config(server.app)
            config.load()
            protocol = BoundedHTTP(config, ServerState(), {}, loop)
            transport = Recorder()
            protocol.connection_made(transport)
            protocol.data_received(head + b"\r\nHost: kit\r\n\r\n")
            protocol.connection_lost(None)
            assert transport.written.startswith(b"HTTP/1.1 431 ") and transport.written.count(b"HTTP/1.1") == 1
            assert protocol.cycle is None
    finally:
        loop.close()
