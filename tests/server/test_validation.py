"""Fields that are refused, each by its name and in an envelope, and fields that are let pass (A08, A16)."""

from collections.abc import Iterator
from typing import Any

import pytest
from kit import MODEL, ScriptedServer, endless, user
from refusals import assert_refused

pytestmark = pytest.mark.usefixtures("idle_afterwards")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL", "long": endless}) as server:
        yield server


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
    assert refused.headers["allow"] == "GET, HEAD"
    assert_refused(server.http.get("/debug/kv?events=many"), 400, "events")
    assert_refused(server.http.get("/debug/kv?events=1000000"), 400, "events")


def test_a16_unknown_fields_are_ignored_and_null_is_absent(server: ScriptedServer):
    optional = server.app.openapi()["components"]["schemas"]["ChatBody"]["properties"].keys() - {"messages"}
    nothing = dict.fromkeys(optional)
    assert server.post_chat("s1", **nothing, surprise={"deep": [1]}).status_code == 200
    plain = dict.fromkeys(("max_tokens", "logprobs", "stop", "echo", "n", "best_of", "suffix", "stream"))
    assert server.post_completion("s1", **plain).status_code == 200


def test_a16_booleans_and_strings_are_not_numbers(server: ScriptedServer):
    for body in ({"max_tokens": True}, {"n": "2"}, {"stop_token_ids": [True]}, {"logprobs": True}):
        [name] = body
        assert_refused(server.post_completion("s1", **body), param=name)
    assert_refused(server.post_completion([True, False]), param="prompt")


def test_a16_paths_are_dotted_and_names_short(server: ScriptedServer):
    image = user([{"type": "text", "text": "x"}, {"type": "y" * 1000}])
    error = assert_refused(server.post_chat(messages=[image]))
    assert error["param"] == "messages.0.content.1" and len(error["message"]) < 300
    both = server.post_chat("s1", add_generation_prompt=True, continue_final_message=True)
    assert_refused(both, param="continue_final_message", code="invalid_value")
    unknown = assert_refused(server.post_chat("s1", model="z" * 1000), 404, "model")
    assert "z" * 99 + "…" in unknown["message"] and "z" * 100 not in unknown["message"]


# ---------------------------------------------------------------------- fields that are not served
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
    for field in ({"suffix": "x"}, {"best_of": 2}, {"response_format": {"type": "json_object"}}):
        assert_refused(server.post_completion("s1", **field), param=next(iter(field)), code="unsupported_parameter")


def test_values_that_ask_for_nothing_are_accepted(server: ScriptedServer):
    assert server.post_chat(
        "s1", tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"], store=False,
        echo=False, parallel_tool_calls=True, prediction={"type": "content", "content": "x"}, user="u",
        metadata={"a": "b"}, service_tier="fast", verbosity="low", reasoning_effort="low", safety_identifier="s",
        prompt_cache_key="k",
    ).status_code == 200  # fmt: skip
    assert server.post_completion("s1", best_of=1, suffix="", n=1).status_code == 200


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ({"repeat_penalty": 1.1}, "repetition_penalty"),
        ({"n_predict": 5}, "max_tokens"),
        ({"num_predict": 5}, "max_tokens"),
        ({"max_new_tokens": -1}, "max_tokens"),
        ({"max_output_tokens": 5}, "max_tokens"),
        ({"min_new_tokens": 5}, "min_tokens"),
        ({"do_sample": False}, "temperature 0"),
        ({"stop_sequences": ["\n"]}, "stop"),
        ({"typical_p": 0.9}, "min_p"),
        ({"mirostat": 2}, "min_p"),
        ({"dry_multiplier": 0.8}, "min_p"),
        ({"xtc_probability": True}, "min_p"),
        ({"top_n_sigma": 1}, "min_p"),
        ({"grammar": "root ::= [a-z]"}, "does not constrain"),
        ({"json_schema": {}}, "does not constrain"),
        ({"format": "json"}, "does not constrain"),
        ({"options": {"num_predict": 5}}, "beside it"),
        ({"num_return_sequences": 2}, "n"),
        ({"max_length": 50}, "max_tokens"),
        ({"eos_token_id": 2}, "stop_token_ids"),
        ({"n_probs": 5}, "logprobs"),
        ({"num_beams": 4}, "min_p"),
        ({"stop_regex": ["a+"]}, "stop"),
    ],
    ids=lambda field: next(iter(field)) if isinstance(field, dict) else "",
)
def test_other_servers_names_are_refused_with_ours(server: ScriptedServer, field: dict[str, Any], ours: str):
    [name] = field
    for post in (server.post_chat, server.post_completion):
        error = assert_refused(post("s1", **field), param=name, code="unsupported_parameter")
        assert error["message"].startswith(f"{name} ") and ours in error["message"]


def test_other_servers_names_that_ask_for_nothing(server: ScriptedServer):
    nothing = {
        "repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "top_n_sigma": -1.0, "dry_multiplier": 0.0,
        "do_sample": True, "grammar": "", "stop_sequences": [], "max_new_tokens": None,
    }  # fmt: skip
    assert server.post_chat("s1", n_predict=-1, num_predict=-1, **nothing).status_code == 200
    assert server.post_completion("s1", **nothing).status_code == 200
    assert_refused(server.post_completion("s1", n_predict=-1), param="n_predict")  # it would end after 16 tokens
    assert "chat_template_kwargs" in assert_refused(server.post_chat("s1", enable_thinking=False))["message"]
    assert server.post_completion("s1", enable_thinking=False).status_code == 200  # no template, no thinking
