"""Messages in every shape that clients send, made fit for the template, or refused by name (A18, A19)."""

from typing import Any

import chat_templates as templates
import pytest
from bytetok import CHATML
from chat_models import MODELS, A, D, S, U, call, rendered, renderer

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatRenderer

# ------------------------------------------------------------------ A18: shapes
EMPTY_CONTENTS: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]


@pytest.mark.parametrize("content", EMPTY_CONTENTS, ids=str)
@pytest.mark.parametrize("family", ["chatml", "llama 3", "thinking"])
def test_a18_tool_calls_without_content(family: str, content: dict[str, Any]) -> None:
    turn = {"role": "assistant", "tool_calls": [call("f", '{"x":1}')], **content}
    history = [U("q"), turn, {"role": "tool", "tool_call_id": "c1", "content": "42"}]
    chat = ChatRenderer(MODELS[family])
    text = chat.render_text(history)
    assert "None" not in text and "[{" not in text
    assert text == chat.render_text([U("q"), {**turn, "content": ""}, history[2]])
    assert chat.render(history)


def test_a18_templates_that_need_content_get_an_empty_one(smollm2_chat: ChatRenderer) -> None:
    """SmolLM2's adds strings: an absent content would be an error."""
    assert not smollm2_chat.traits.takes_absent_content
    for content in EMPTY_CONTENTS:
        turn = {"role": "assistant", "tool_calls": [call("f", "{}")], **content}
        assert smollm2_chat.render_text([U("q"), turn]).count("<|im_start|>assistant\n<|im_end|>") == 1


def test_a18_templates_that_print_none_get_an_empty_content() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.get('content') }}{% endfor %}"
    assert rendered([U("q"), A(None, tool_calls=[call("f", "{}")])], template) == "user:qassistant:"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a18_parts_are_joined_by_a_newline(role: str) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert rendered([{"role": role, "content": parts}]) == rendered([{"role": role, "content": "he\nllo"}])
    assert rendered([{"role": role, "content": ["a"]}]) == rendered([{"role": role, "content": "a"}])


def test_a18_templates_that_go_through_parts() -> None:
    assert renderer(templates.PARTS).traits.takes_parts and not renderer().traits.takes_parts
    expected = "<|im_start|>user\nhe\nllo<|im_end|>\n"
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert rendered([U(parts)], templates.PARTS) == rendered([U("he\nllo")], templates.PARTS) == expected


def test_a18_arguments_reach_templates_in_the_form_they_want() -> None:
    assert renderer(templates.ARGUMENT_TEXT).traits.takes_argument_text
    for arguments in ('{"x": 1}', {"x": 1}):
        turns = [U("q"), A(None, tool_calls=[call("f", arguments)])]
        assert 'CALL f\n{"x": 1}' in rendered(turns, templates.ARGUMENT_TEXT)
        text = ChatRenderer(MODELS["llama 3"]).render_text(turns)
        assert '"parameters": {"x": 1}' in text
    for arguments in (None, "", {}):
        turns = [U("q"), A(None, tool_calls=[call("f", arguments)])]
        assert '"parameters": {}' in ChatRenderer(MODELS["llama 3"]).render_text(turns)


def test_a18_arguments_that_are_no_json_are_handed_on() -> None:
    turns = [U("q"), A(None, tool_calls=[call("f", '{"x": ')])]
    assert '"arguments": {"x": }' in ChatRenderer(MODELS["thinking"]).render_text(turns)


def test_a18_consecutive_roles_are_the_templates_choice() -> None:
    assert rendered([U("a"), U("b")]).count("<|im_start|>user") == 2
    with pytest.raises(
        InvalidRequest, match=r"^Conversation roles must alternate user/assistant/user/assistant/\.\.\.$"
    ):
        ChatRenderer(MODELS["mistral"]).render([U("a"), U("b")])


def test_a18_other_keys_are_tolerated() -> None:
    odd = {
        "name": "n",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "mood": {"a": [1, 2.5, True]},
        "tool_calls": [],
    }
    assert rendered([{**U("a"), **odd}, {**A("b"), **odd}]) == rendered([U("a"), A("b")])
    chat = ChatRenderer(MODELS["llama 3"])  # its template takes an empty list of calls for calls
    assert chat.render([U("a"), {**A("b"), **odd}]) == chat.render([U("a"), A("b")])


def test_a18_refusals_are_what_the_assistant_said() -> None:
    said = rendered([U("a"), A("I will not.")])
    assert rendered([U("a"), A(None, refusal="I will not.")]) == said
    assert rendered([U("a"), A([{"type": "refusal", "refusal": "I will not."}])]) == said


def test_reasoning_under_any_of_its_names() -> None:
    chat = ChatRenderer(MODELS["thinking"])
    texts = {
        key: chat.render_text([U("q"), A("a", **{key: "hm"})]) for key in ("reasoning", "thinking", "reasoning_content")
    }
    assert "<think>\nhm\n</think>\n\na" in texts["reasoning"] and len(set(texts.values())) == 1


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], r"messages.0 must be an object"),
        ([{"content": "x"}], r"messages.0\.role must be one of .*; got None"),
        ([{"role": "root", "content": "x"}], "got 'root'"),
        ([U("x"), U(None)], r"messages.1\.content is required"),
        ([{"role": "user"}], "content is required"),
        ([{"role": "assistant"}], "content is required"),
        ([U(3)], "must be a string or a list of parts"),
        ([U([{"type": "input_audio"}])], "is of type 'input_audio'; this model takes text only"),
        (
            [U([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}])],
            r"content.1 is of type 'image_url'",
        ),
        ([U([{"type": "text"}])], r"content.0\.text must be a string"),
        ([U([3])], "is of type None"),
        ([A(None, tool_calls={"a": 1})], "tool_calls must be a list"),
        ([A(None, tool_calls=[3])], "must hold calls with a function"),
        ([A(None, tool_calls=[{"function": {"arguments": "{}"}}])], "and its name"),
        ([{**U("x"), "extra": object()}], "is not JSON"),
        ([{**U("x"), "extra": {1: 2}}], "is not JSON"),
    ],
)
def test_what_cannot_be_taken_is_a_400_that_names_it(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        renderer().render(messages)
    assert caught.value.param is not None and caught.value.param.startswith("messages")


def test_deep_nesting_is_a_400() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for options in ({"messages": [{**U("x"), "extra": deep}]}, {"messages": [U("x")], "tools": [{"a": deep}]}):
        with pytest.raises(InvalidRequest, match="is nested more than 64 levels deep"):
            renderer().render(**options)
    for depth in (100, 900, 100_000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        chat = [U("q"), A(None, tool_calls=[call("f", arguments)])]
        if depth < 5000:
            with pytest.raises(InvalidRequest, match="is nested more than 64 levels deep"):
                renderer().render(chat)
        else:
            assert renderer().render(chat), "beyond the JSON parser: text, as any that is no JSON"


# ------------------------------------------------------------------ A19: developer
@pytest.mark.parametrize("template", [templates.STRICT, templates.IGNORING, CHATML])
def test_a19_developer_becomes_system(template: str) -> None:
    text = rendered([D("Answer in French"), U("hi")], template)
    assert text.startswith("<|im_start|>system\nAnswer in French<|im_end|>\n<|im_start|>user\nhi")


def test_a19_leading_instructions_are_merged_in_order() -> None:
    text = rendered([S("one"), D("two"), U("hi")], templates.SYSTEM_FIRST)
    assert text == "<|im_start|>system\none\n\ntwo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_a19_templates_that_know_it_get_it() -> None:
    text = rendered([D("x"), U("hi")], templates.DEVELOPER)
    assert text.count("developer") == 1 and "# Instructions\nx<|im_end|>" in text


def test_a19_a_later_developer_message() -> None:
    assert "<|im_start|>system\nnow shout<|im_end|>" in rendered([U("hi"), D("now shout"), U("go")], templates.STRICT)
    with pytest.raises(InvalidRequest, match="System message must be first"):
        rendered([U("hi"), D("now shout"), U("go")], templates.SYSTEM_FIRST)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a19_an_instruction_that_would_be_dropped_is_refused(role: str) -> None:
    with pytest.raises(InvalidRequest, match="has no place for this system message"):
        rendered([{"role": role, "content": "Answer in French"}, U("hi")], templates.NO_SYSTEM)
    assert rendered([U("hi")], templates.NO_SYSTEM) == "U:hi\n"


def test_system_messages_alone_are_left_as_they_are() -> None:
    assert rendered([S("one"), S("two"), U("hi")]).count("<|im_start|>system") == 2
