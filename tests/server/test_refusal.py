"""What a refusal says: one sentence with the field, its value, shortened, and what is expected; the first of several
and the names of the others (A16)."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kit import ScriptedServer
from refusals import assert_refused

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.sampling_params import SamplingParams
from server.errors import about
from server.protocol.body import MAX_ECHOED_BODY, parse
from server.protocol.chat import ChatBody
from server.protocol.completion import CompletionBody
from server.protocol.tokens import DetokenizeBody, TokenizeBody

JARGON = re.compile(
    r"Input should|valid |valid_|_type|_parsing|function-|union|tagged|discriminator|Unable to|dict_|list\[|Value error"
    r"|instance of|validation|None\b|True\b|False\b|NoneType|<class|\bstr\b|\bint\b|\bdict\b|\bbool\b",
    re.ASCII,
)
WINDOW = 128
DIGITS = "100 digits"
BASES: dict[type[Any], tuple[str, dict[str, Any]]] = {
    ChatBody: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "s1"}], "max_tokens": 1}),
    CompletionBody: ("/v1/completions", {"prompt": "s1", "max_tokens": 1}),
    TokenizeBody: ("/tokenize", {"prompt": "s1"}),
    DetokenizeBody: ("/detokenize", {"tokens": [65]}),
}
VALUES = [
    "s1" * 100, "2", True, 5, -1, 0, 1.5, 2**70, 10**120, -(10**120), [], {}, [5], ["s1", 5], [True], [None], [[]],
    {"a": 1}, {"5": "x"}, {"5": 1e9}, {"5": 10**200}, ["x" * 600 + "s1"], [2**70], [10**3000], [-1], [10**6], [{}],
    [{"role": "user"}], [{"role": "alien", "content": 5}], [{"role": "user", "content": [{"type": 5}]}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "assistant", "tool_calls": [{"function": 5}]}],
    {"include_usage": []},
]  # fmt: skip
WHOSE = {field: shape for shape in reversed(list(BASES)) for field in shape.model_fields}
"""Each field once: shapes share them. `logprobs` and `prompt` differ."""
FIELDS = [
    *((shape, field) for field, shape in sorted(WHOSE.items())),
    (CompletionBody, "logprobs"),
    (TokenizeBody, "prompt"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"": b"ABC"}, window=WINDOW) as server:
        yield server


@pytest.mark.parametrize(("shape", "field"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_a16_every_field_is_refused_in_plain_words(server: ScriptedServer, shape: type[Any], field: str):
    path, base = BASES[shape]
    refused = 0
    for value in VALUES:
        response = server.http.post(path, content=json.dumps({**base, field: value}).encode())
        if response.status_code in (200, 404):
            continue
        refused += 1
        error = assert_refused(response)
        message, param = error["message"], error["param"]
        shown = f"{json.dumps(value)[:80]} -> {message}"
        assert param and param.split(".")[0] in shape.model_fields, shown
        assert param in message or error["code"] == "context_length_exceeded" or f"The {param}" in message, shown
        assert message.endswith(".") and len(message) < 400 and not JARGON.search(message), shown
    assert refused


@pytest.mark.parametrize(
    ("shape", "change", "param", "message"),
    [
        (ChatBody, {"temperature": "hot"}, "temperature", 'temperature must be a number, got "hot".'),
        (ChatBody, {"n": 2.5}, "n", "n must be an integer, got 2.5."),
        (
            ChatBody,
            {"n": 10**120},
            "n",
            "n must be an integer of at most 100 digits, got a number of more than 100 digits.",
        ),
        (ChatBody, {"stream": "maybe"}, "stream", 'stream must be true or false, got "maybe".'),
        (ChatBody, {"stop": {"a": 1}}, "stop", "stop must be a string or a list, got an object."),
        (ChatBody, {"stop": ["a", 5]}, "stop.1", "stop.1 must be a string, got 5."),
        (ChatBody, {"user": 5}, "user", "user must be a string, got 5."),
        (ChatBody, {"model": ["x"]}, "model", "model must be a string, got a list of 1."),
        (ChatBody, {"temperature": "x" * 70}, "temperature", f'temperature must be a number, got "{"x" * 59}…".'),
        (ChatBody, {"messages": []}, "messages", "messages must be a list of 1 or more entries, got an empty list."),
        (ChatBody, {"messages": None}, "messages", "messages must be a list, got null."),
        (ChatBody, {"messages": [{}]}, "messages.0.role", "messages.0.role is required."),
        (
            ChatBody,
            {"service_tier": "gold"},
            "service_tier",
            "service_tier must be one of 'auto', 'default', 'flex', 'scale', 'priority' or 'fast', got \"gold\".",
        ),
        (
            ChatBody,
            {"logit_bias": {"5": "x"}},
            "logit_bias",
            'logit_bias must be an object of numbers, got "x" for "5".',
        ),
        (ChatBody, {"top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20, got 21."),
        (
            CompletionBody,
            {"prompt": 5},
            "prompt",
            "prompt must be a text, texts, token ids or lists of them, got 5.",
        ),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt.1", 'prompt.1 must be an integer, got "a".'),
    ],
    ids=str,
)
def test_a16_the_sentence(shape: type[Any], change: dict[str, Any], param: str, message: str):
    with pytest.raises(InvalidRequest) as caught:
        parse(shape, json.dumps({**BASES[shape][1], **change}).encode())
    assert (caught.value.param, caught.value.message) == (param, message)


def test_a16_the_first_of_several_is_explained_and_the_others_named():
    wrong = {"n": "a", "temperature": "b", "stop": 5, "messages": [{"role": 5, "content": [{"type": 5}]}]}
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, json.dumps(wrong).encode())
    first, rest = caught.value.message.split(" Also wrong: ")
    names = rest.removesuffix(".").split(", ")
    assert first.startswith(f"{caught.value.param} must be ") and caught.value.param not in names
    expected = {"n", "temperature", "stop", "messages.0.role", "messages.0.content.0.type"}
    assert {caught.value.param, *names} == expected and len(names) == 4


def test_a16_many_are_counted():
    wrong = {name: {} for name in ("n", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "stop", "model")}
    with pytest.raises(InvalidRequest) as caught:
        parse(ChatBody, json.dumps({**BASES[ChatBody][1], **wrong}).encode())
    assert caught.value.message.count(",") == 5 and caught.value.message.endswith(" and 3 more.")


def test_a16_of_values_out_of_range_the_others_are_named_too():
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(n=0, temperature=9.0, top_p=0.0, stop=("", "x" * 600))
    assert caught.value.param == "n" and str(caught.value) == caught.value.message
    assert caught.value.message == "n must be between 1 and 128, got 0. Also wrong: temperature, top_p, stop."
    with pytest.raises(InvalidRequest) as alone:
        SamplingParams(stop=("", "x" * 600))
    assert "Also" not in alone.value.message, "it is one field"


def test_a16_a_query_is_refused_in_the_same_words(server: ScriptedServer):
    for value, message in (("many", 'an integer, got "many"'), ("5000", 'at most 1000, got "5000"')):
        error = assert_refused(server.http.get(f"/debug/kv?events={value}"), param="events")
        assert error["message"] == f"events must be {message}."


def test_values_of_large_bodies_are_not_built_again_to_be_shown():
    for size, message in ((10, 'n must be an integer, got "a".'), (MAX_ECHOED_BODY, "n must be an integer.")):
        with pytest.raises(InvalidRequest) as caught:
            parse(CompletionBody, json.dumps({"prompt": "x" * size, "n": "a"}).encode())
        assert caught.value.message == message


def test_a37_an_object_of_bad_values_brings_one_error():
    biases = {str(number): "" for number in range(1024)}
    with pytest.raises(InvalidRequest) as caught:
        parse(CompletionBody, json.dumps({"prompt": "x", "logit_bias": biases}).encode())
    assert caught.value.message == 'logit_bias must be an object of numbers, got "" for "0".'
    biases["1024"] = 1
    with pytest.raises(InvalidRequest, match="at most 1024 entries, got 1025"):
        parse(CompletionBody, json.dumps({"prompt": "x", "logit_bias": biases}).encode())


# ---------------------------------------------------------------------- whose text it was
def test_a17_param_says_which_prompt_is_too_long(server: ScriptedServer):
    code = "context_length_exceeded"
    for text in ("x" * WINDOW, "x" * (20 * WINDOW)):  # found by tokens, and by its length alone
        assert assert_refused(server.post_chat(text), code=code)["param"] == "messages"
        assert assert_refused(server.post_completion(text), code=code)["param"] == "prompt"
        assert assert_refused(server.post_completion(["s1", text]), code=code)["param"] == "prompt.1"
    assert assert_refused(server.post_completion([65] * WINDOW), code=code)["param"] == "prompt"


def test_a16_param_of_other_texts(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **fields: Any) -> list[int]:
        raise InvalidRequest("The text cannot be encoded.", None, "invalid_value")

    for name in ("encode", "encode_plain", "encode_trusted"):
        monkeypatch.setattr(server.tokenizer, name, refuse)
    post = server.http.post
    messages = [{"role": "user", "content": "x"}]
    assert assert_refused(server.post_chat("s1"))["param"] == "messages"
    assert assert_refused(server.post_completion("s1"))["param"] == "prompt"
    assert assert_refused(server.post_completion([65], bad_words=["x"]))["param"] == "bad_words"
    assert assert_refused(post("/tokenize", json={"prompt": "x"}))["param"] == "prompt"
    assert assert_refused(post("/tokenize", json={"messages": messages}))["param"] == "messages"


def test_about_leaves_what_names_a_field_alone():
    with pytest.raises(InvalidRequest) as named, about("prompt"):
        raise InvalidRequest("x", "n")
    with pytest.raises(ContextLengthExceeded) as unnamed, about("prompt"):
        raise ContextLengthExceeded(4, 5)
    assert (named.value.param, unnamed.value.param) == ("n", "prompt")
