"""Conversations as clients send them, up to the prompt that the model sees (A18, A38)."""

from collections.abc import Iterator
from typing import Any

import pytest
from bytetok import CHATML, byte_tokenizer
from kit import MODEL, ScriptedServer, user
from refusals import assert_refused

from engine.text.chat_template import ChatRenderer

pytestmark = pytest.mark.usefixtures("idle_afterwards")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer({"s1": b"ABCDEFGHIJKL"}) as server:
        yield server


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


def test_tokenize_gives_the_template_what_a_chat_gives_it():
    effort = CHATML + "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    with ScriptedServer({"s1": b"A"}) as server:
        server.context.client.model = type(server.context.client.model)(
            (MODEL,), server.tokenizer, ChatRenderer(byte_tokenizer(template=effort)), {}
        )
        assert server.post_chat("s1", reasoning_effort="high").status_code == 200
        asked = {"messages": [user("s1")], "reasoning_effort": "high"}
        found = server.http.post("/tokenize", json=asked).json()["tokens"]
        assert found == list(server.executor.prompts[-1]) and server.tokenizer.decode(found, False).endswith("[high]")
        refused = server.http.post("/tokenize", json={"messages": [user("s1")], "enable_thinking": False})
        assert "chat_template_kwargs" in assert_refused(refused, param="enable_thinking")["message"]


def test_an_unfinished_answer_can_be_continued(server: ScriptedServer):
    messages = [user("s1"), {"role": "assistant", "content": "Well, s1"}]
    server.chat("", messages=messages, continue_final_message=True)
    assert server.tokenizer.decode(server.executor.prompts[-1], False).endswith("Well, s1")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert_refused(server.post_chat(messages=messages, **both), param="continue_final_message")
