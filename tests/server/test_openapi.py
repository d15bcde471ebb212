"""GET /openapi.json tells the truth: shapes of answers, bounds of fields, who needs a key."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kit import MODEL, ScriptedServer, user
from refusals import assert_refused

from server.protocol import shapes

KEY, ADMIN_KEY = "key", "admin-key"
ASKED_FOR_ALL = {"return_token_ids": True, "n": 2, "service_tier": "flex", "stop": "E"}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    settings = {"api_key": (KEY,), "admin_api_key": ADMIN_KEY, "served_model_name": (MODEL,)}
    with ScriptedServer({"s1": b"ABCDEF"}, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: ScriptedServer) -> dict[str, Any]:
    return server.http.get("/openapi.json").json()


def assert_fits(shape: type[shapes.Shape], answer: str | bytes) -> None:
    """The shape tells of everything in the answer, at every depth, and asks for nothing else."""
    assert shape.model_validate_json(answer, strict=True).model_dump(exclude_unset=True) == json.loads(answer)


# ---------------------------------------------------------------------- answers
@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": True, "top_logprobs": 2, **ASKED_FOR_ALL}, {"prompt_logprobs": 1, "max_tokens": 2}],
    ids=["plain", "all", "prompt"],
)
def test_chat_answers(server: ScriptedServer, fields: dict[str, Any]):
    assert_fits(shapes.ChatCompletion, server.post_chat("s1", **fields).content)


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": 2, **ASKED_FOR_ALL}, {"prompt_logprobs": 1, "echo": True, "logprobs": 0, "max_tokens": 2}],
    ids=["plain", "all", "prompt"],
)
def test_text_answers(server: ScriptedServer, fields: dict[str, Any]):
    assert_fits(shapes.Completion, server.post_completion("s1", **fields).content)


@pytest.mark.parametrize("usage", [{}, {"include_usage": True, "continuous_usage_stats": True}], ids=["", "usage"])
def test_chunks(server: ScriptedServer, usage: dict[str, bool]):
    options = {"stream_options": usage, **ASKED_FOR_ALL}
    for frame in server.stream_chat("s1", logprobs=True, top_logprobs=2, **options).frames:
        assert_fits(shapes.ChatCompletionChunk, json.dumps(frame))
    for frame in server.stream_completion("s1", logprobs=2, **options).frames:
        assert_fits(shapes.CompletionChunk, json.dumps(frame))


@pytest.mark.parametrize(
    "shape, method, path, body",
    [
        (shapes.ModelList, "GET", "/v1/models", None),
        (shapes.ModelCard, "GET", f"/v1/models/{MODEL}", None),
        (shapes.Tokenized, "POST", "/tokenize", {"prompt": "s1", "return_token_strs": True}),
        (shapes.Detokenized, "POST", "/detokenize", {"tokens": [65]}),
        (shapes.Healthy, "GET", "/health", None),
        (shapes.Healthy, "POST", "/ping", None),
        (shapes.VersionAnswer, "GET", "/version", None),
        (shapes.KVShape, "GET", "/debug/kv?events=50", None),
        (shapes.Aborted, "POST", "/abort_requests", {"request_ids": ["none"]}),
        (shapes.Evicted, "POST", "/reset_prefix_cache", None),
        (shapes.ServerLoad, "GET", "/load", None),
        (shapes.ServerInfo, "GET", "/server_info", None),
        (shapes.ErrorAnswer, "GET", "/v1/models/none", None),
    ],
)
def test_other_answers(server: ScriptedServer, shape: type[shapes.Shape], method: str, path: str, body: object):
    server.chat("s1")
    answer = server.http.request(method, path, json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.is_success == (shape is not shapes.ErrorAnswer)
    assert_fits(shape, answer.content)


def test_answers_of_a_server_that_is_not_ready():
    with ScriptedServer({}, loads=threading.Event()) as server:
        answer = server.http.get("/readyz")
        assert answer.status_code == 503
        assert_fits(shapes.Unavailable, answer.content)
        assert_fits(shapes.Healthy, server.http.get("/health").content)


def test_every_operation_names_its_answers(document: dict[str, Any]):
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    references = set()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            assert operation["responses"]["200"]["content"], path
            for response in operation["responses"].values():
                for content in response["content"].values():
                    assert content.get("schema") or content.get("itemSchema"), path
    collect_references(document, references)
    assert references <= known
    assert known <= references, "nothing is described that nobody refers to"


def collect_references(part: Any, found: set[str]) -> None:
    if isinstance(part, dict):
        found.update(value for key, value in part.items() if key == "$ref")
        part = list(part.values())
    if isinstance(part, list):
        for item in part:
            collect_references(item, found)


# ---------------------------------------------------------------------- keys
def test_it_says_who_needs_a_key(server: ScriptedServer, document: dict[str, Any]):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = server.http.request(method, path.replace("{model}", MODEL), headers={"authorization": ""})
            assert ("401" in operation["responses"]) == ("security" in operation) == (answer.status_code == 401), path


def test_with_an_admin_key_alone_the_control_routes_need_it():
    with ScriptedServer({}, admin_api_key="admin") as server:
        document = server.http.get("/openapi.json").json()
        closed = {path for path, found in document["paths"].items() if any("security" in one for one in found.values())}
        assert closed == {"/abort_requests", "/reset_prefix_cache", "/load", "/server_info"}
        assert "key" in document["components"]["securitySchemes"]


def test_without_keys_nobody_needs_one():
    with ScriptedServer({}) as server:
        document = server.http.get("/openapi.json").json()
        assert "securitySchemes" not in document["components"]
        assert "401" not in document["paths"]["/v1/models"]["get"]["responses"]


# ---------------------------------------------------------------------- fields
def bounds(document: dict[str, Any], shape: str) -> Iterator[tuple[str, Any, Any]]:
    """(field, a value that is just allowed, one that is just not)."""
    for field, schema in document["components"]["schemas"][shape]["properties"].items():
        for rule in schema.get("anyOf", [schema]):
            step = 1 if rule.get("type") == "integer" else 0.001
            if "minimum" in rule:
                yield field, rule["minimum"], rule["minimum"] - step
            if "maximum" in rule:
                yield field, rule["maximum"], rule["maximum"] + step
            if "exclusiveMinimum" in rule:
                yield field, rule["exclusiveMinimum"] + 0.001, rule["exclusiveMinimum"]
            if "minLength" in rule:
                yield field, "x" * rule["minLength"], "x" * (rule["minLength"] - 1)
            if rule.get("type") == "string" and "maxLength" in rule:
                yield field, "x" * rule["maxLength"], "x" * (rule["maxLength"] + 1)
            if rule.get("type") == "array" and field != "prompt":
                item = "x" if rule["items"]["type"] == "string" else 65
                if "maxItems" in rule:
                    yield field, [item] * rule["maxItems"], [item] * (rule["maxItems"] + 1)
                if rule.get("minItems"):
                    yield field, [item] * rule["minItems"], []


BOUNDED = {
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed",
    "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "bad_words", "allowed_token_ids",
    "truncate_prompt_tokens", "prompt_logprobs", "logprobs", "cache_salt", "priority",
    "request_id",
}  # fmt: skip


def test_bounds_are_where_it_says(server: ScriptedServer, document: dict[str, Any]):
    seen = set()
    for field, allowed, beyond in bounds(document, "CompletionBody"):
        seen.add(field)
        besides: dict[str, Any] = {"max_tokens": 2, "prompt": "s1"}
        if field == "max_tokens" and allowed == 0:
            besides["echo"] = True  # nothing but the prompt
        if field == "min_tokens":
            besides["max_tokens"] = allowed or 1
        if field != "priority":  # whose values depend on the policy
            answer = server.http.post("/v1/completions", json={**besides, field: allowed})
            assert answer.status_code == 200, (field, allowed, answer.text)
        assert_refused(server.http.post("/v1/completions", json={**besides, field: beyond}), param=field)
    assert seen == BOUNDED


def test_fields_that_are_not_served_are_said_to_take_nothing(server: ScriptedServer, document: dict[str, Any]):
    for shape, path in (("ChatBody", "/v1/chat/completions"), ("CompletionBody", "/v1/completions")):
        properties = document["components"]["schemas"][shape]["properties"]
        refused = {name: schema["enum"] for name, schema in properties.items() if "enum" in schema}
        assert {"response_format", "structured_outputs"} <= refused.keys()
        body = {"messages": [user("s1")], "prompt": "s1"}
        for name, harmless in refused.items():
            for value in harmless:
                assert server.http.post(path, json={**body, name: value}).status_code == 200, (name, value)
            assert_refused(server.http.post(path, json={**body, name: {"other": 0}}), code="unsupported_parameter")


@pytest.mark.parametrize("value", ["true", "false", 1, 0, 1.0, [], {}])
def test_a_boolean_is_true_or_false(server: ScriptedServer, value: object):
    for field in ("stream", "logprobs", "ignore_eos", "return_token_ids", "add_generation_prompt"):
        assert_refused(server.post_chat("s1", **{field: value}), param=field)
    assert_refused(server.post_completion("s1", echo=value), param="echo")
    assert_refused(
        server.post_chat("s1", stream_options={"include_usage": value}), param="stream_options.include_usage"
    )


def test_a_method_that_a_path_does_not_take_is_answered_with_all_it_takes(server: ScriptedServer):
    for path, allowed in (
        ("/ping", "GET, HEAD, POST"),
        ("/v1/completions", "POST"),
        ("/v1/models/any/name", "GET, HEAD"),
    ):
        refused = server.http.delete(path)
        assert_refused(refused, 405, code="method_not_allowed")
        assert refused.headers["allow"] == allowed and allowed in refused.json()["error"]["message"]
