"""From bytes to a checked body: whatever comes in, it is a model or a refusal in words."""

import gc
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from server.protocol.body import parse
from server.protocol.chat import ChatBody
from server.protocol.completion import CompletionBody
from server.protocol.tokens import DetokenizeBody, TokenizeBody
from server.protocol.unsupported import CHAT, COMPLETION, TEMPLATE, refuse

SHAPES = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]
USER = {"role": "user", "content": "x"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("shape", SHAPES)
@given(raw=st.binary(max_size=40))
@settings(max_examples=60)
def test_bytes_are_parsed_or_refused(shape, raw: bytes):
    try:
        parse(shape, raw)
    except InvalidRequest as error:
        assert error.message


@pytest.mark.parametrize("shape", SHAPES)
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_fields_of_any_type_are_parsed_or_refused_by_name(shape, data: st.DataObject):
    names = sorted(shape.model_fields)
    body = data.draw(st.dictionaries(st.sampled_from(names), json_values, max_size=4))
    try:
        parsed = parse(shape, json.dumps(body).encode())
        table = {ChatBody: CHAT, CompletionBody: COMPLETION, TokenizeBody: TEMPLATE}.get(shape, ())
        refuse(parsed, table)
    except InvalidRequest as error:
        assert error.param is None or error.param.split(".")[0] in shape.model_fields, error.param
        assert error.message and "pydantic" not in error.message


def test_a_large_body_is_parsed_without_garbage_collections():
    """They would go through what is being built again and again, and hold up every other thread."""
    body = b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"x": [' + b"[]," * 100_000 + b"[]]}}"
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        gc.collect()
        collections.clear()
        parsed = parse(ChatBody, body)
    finally:
        gc.callbacks.pop()
    assert parsed.num_bytes == len(body) and gc.isenabled()
    assert collections.count("start") < 5, "else there is one for some hundreds of lists"
    with pytest.raises(InvalidRequest):
        parse(ChatBody, body[:-1])
    assert gc.isenabled()


def refusal(shape: Any, body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(shape, json.dumps(body).encode())
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER, {"role": "alien", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [USER], "stream_options": {"include_usage": []}}, "stream_options.include_usage"),
        ({"messages": [USER], "stop": ["a", 5]}, "stop"),
        ({"messages": [USER], "logit_bias": {"5": "x"}}, "logit_bias"),
        ({"messages": [USER], "temperature": float("nan")}, "temperature"),
    ],
)
def test_a_refusal_names_the_path(body: dict[str, Any], param: str):
    error = refusal(ChatBody, body)
    assert error.param is not None and error.param.startswith(param), error.param
    assert error.message.startswith(error.param)


def test_prompts_of_every_kind():
    for prompt in ("text", ["a", "b"], [1, 2], [[1], [2, 3]], "", []):
        assert parse(CompletionBody, json.dumps({"prompt": prompt}).encode()).prompt == prompt
    for mixed in (["a", 1], [1, "a"], [[1], 2], [["a"]], 5, {"a": 1}, None, [None]):
        assert str(refusal(CompletionBody, {"prompt": mixed}).param).startswith("prompt")


def test_unknown_keys_of_a_message_reach_the_template():
    message = {**USER, "tool_responses": [1], "weight": 2}
    body = parse(ChatBody, json.dumps({"messages": [message], "surprise": 1}).encode())
    assert body.messages[0].model_dump(exclude_none=True) == message and not hasattr(body, "surprise")


def test_a_list_of_bad_items_brings_one_error():
    error = refusal(CompletionBody, {"prompt": ["x"] + [5] * 500})
    assert error.message == "prompt.1 must be a string, got 5."


def test_names_of_unknown_fields_are_logged_without_their_values(caplog: pytest.LogCaptureFixture):
    body = json.dumps({"prompt": "x", "temprature": "secret", "a\nb": 1, "n": 1}).encode()
    with caplog.at_level(logging.DEBUG, "octavo.server"):
        parse(CompletionBody, body)
        parse(CompletionBody, b'{"prompt": "x"}')
    [record] = caplog.records
    assert record.getMessage() == '2 unknown fields are ignored: "a\\nb", "temprature"'
    caplog.clear()
    with caplog.at_level(logging.INFO, "octavo.server"):
        parse(CompletionBody, body)
    assert not caplog.records


def test_a_body_knows_its_size():
    raw = json.dumps({"messages": [USER], "chat_template_kwargs": {"a": ["x" * 2000]}}).encode()
    assert parse(ChatBody, raw).num_bytes == len(raw)
