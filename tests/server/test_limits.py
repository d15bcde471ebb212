"""A37: requests that ask for more than anyone gets are refused, and nobody else notices."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import MODEL, ScriptedServer, endless, user
from refusals import assert_refused

from engine.errors import InvalidRequest
from server.limits import MEBIBYTE, HTTPLimits
from server.protocol.body import MAX_BRACKETS, MAX_KEYS, MAX_VALUES, Body, _check_counts, num_values, parse
from server.protocol.chat import MAX_TEMPLATE_VALUES, ChatBody
from server.protocol.tokens import DetokenizeBody

pytestmark = pytest.mark.usefixtures("idle_afterwards")
BODY_LIMIT = MEBIBYTE
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}, limits=HTTPLimits(body_bytes=BODY_LIMIT)) as server:
        yield server


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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [user("x")] * 4097}, "messages"),
        ({"messages": []}, "messages"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"priority": 2**31}, "priority"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a37_the_first_value_beyond_a_bound(server: ScriptedServer, body: dict[str, Any], param: str):
    assert_refused(server.post_chat(None, **{"messages": [user("s1")], **body}), param=param, code="invalid_value")


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_compressed_bodies_are_not_taken_for_json(server: ScriptedServer, path: str):
    packed = server.http.post(path, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert_refused(packed, 415, code="unsupported_content_encoding")
    assert "'gzip'" in packed.json()["error"]["message"]
    plain = server.http.post(path, content=b"{", headers={"content-encoding": "identity"})
    assert_refused(plain, code="invalid_json")


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


# ---------------------------------------------------------------------- bodies of very many values
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'
CALL = b'{"function":{"name":"f"}}'


def objects(count: int, between: bytes = b":") -> bytes:
    return b"{" + b",".join(b'"k%d"%b1' % (number, between) for number in range(count)) + b"}"


def items(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":' + items(b"1", MAX_VALUES) + b"}"),
        ("/v1/completions", b'{"prompt":' + items(items(b"1", 3000), 500) + b"}"),
        ("/v1/completions", b'{"prompt":"x","surprise":' + objects(MAX_KEYS + 1) + b"}"),
        ("/v1/completions", b'{"prompt":"x","surprise":' + objects(MAX_KEYS, b" \n:") + b"}"),
        ("/v1/completions", b'{"prompt":"x","surprise":{' + b",".join([rb'"\\":1'] * (MAX_KEYS + 1)) + b"}}"),
        ("/v1/chat/completions", b"{" + MESSAGES + b',"chat_template_kwargs":' + objects(MAX_KEYS + 1) + b"}"),
        (
            "/v1/chat/completions",
            b"{" + MESSAGES + b',"chat_template_kwargs":{"a":' + items(b"[1]", MAX_VALUES) + b"}}",
        ),
        ("/v1/chat/completions", b'{"messages":' + items(b"{}", MAX_VALUES) + b"}"),
        ("/tokenize", b"{" + MESSAGES + b',"surprise":' + items(b"[]", MAX_VALUES) + b"}"),
        ("/tokenize", b"{" + MESSAGES + b',"surprise":' + items(b"[]", MAX_BRACKETS) + b"}"),
        ("/detokenize", b'{"tokens":' + items(b"1", MAX_VALUES) + b"}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a37_bodies_of_too_many_values_are_never_parsed(path: str, body: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Body, "model_validate_json", None)
    with ScriptedServer({}) as large:
        assert_refused(large.http.post(path, content=body), code="request_too_complex")


TEXTS = st.text('":\\ ,{', max_size=6)
JSON = st.recursive(TEXTS | st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


def num_keys(value: Any) -> int:
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return (len(value) if isinstance(value, dict) else 0) + sum(map(num_keys, inner))


@settings(max_examples=300, deadline=None)
@given(JSON, st.sampled_from([(",", ":"), (", ", ": "), (",", " \n:")]))
def test_a37_keys_are_told_from_colons_in_texts(value: Any, separators: tuple[str, str]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.protocol.body.MAX_KEYS", 2)
        raw = json.dumps(value, separators=separators).encode()
        with pytest.raises(InvalidRequest) if num_keys(value) > 2 else nullcontext():
            _check_counts(raw)


def test_a37_tool_calls_and_what_a_template_is_given(server: ScriptedServer):
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert_refused(
        server.post_chat(messages=[{**calls, "tool_calls": calls["tool_calls"] * 1025}]), code="invalid_value"
    )
    many = [0] * (MAX_TEMPLATE_VALUES + 1)
    for fields in (
        {"chat_template_kwargs": {"a": many}},
        {"messages": [{**user("s1"), "x": {"y": many}}]},
        {"messages": [user([{"type": "text", "text": "s1", "x": [many]}])]},
        {"messages": [{**calls, "tool_calls": [{"function": {"name": "f", "arguments": {"a": many}}}]}, user("s1")]},
    ):
        error = assert_refused(server.post_chat(**{"messages": [user("s1")], **fields}), param="messages")
        assert str(MAX_TEMPLATE_VALUES) in error["message"]
    assert server.chat("s1", chat_template_kwargs={"a": [0] * 50_000})["choices"]


def test_values_are_counted_at_every_depth():
    body = parse(ChatBody, b"{" + MESSAGES + b',"chat_template_kwargs":{"a":[1,null,[2,{"b":3}]]}}')
    assert num_values(body.messages, limit=100) == 3  # the message, its role, its content
    assert num_values(body.chat_template_kwargs, None, limit=100) == 6
    assert num_values([0] * 1000, [0] * 1000, limit=5) > 5
