"""Messages as clients send them, to messages as a template can take them (A18, A19).

content     a string, or a list of text parts: the parts' texts joined by a newline
            None, absent or [] where an assistant message has tool calls (or a refusal)
arguments   of a tool call: JSON text, an object for templates that go through it
developer   kept where the template knows the role, else a system message; with the system and developer messages
            at the head of the conversation it then makes one system message, in their order
other keys  handed on; those that are null are left out, as in transformers
"""

import json
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest

Message = dict[str, Any]

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
PART_JOINER = "\n"
INSTRUCTION_JOINER = "\n\n"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MAX_DEPTH = 64
"""Levels of objects and lists inside one another."""


@dataclass(frozen=True)
class TemplateTraits:
    """What a template expects, found by rendering probes."""

    takes_developer: bool = False
    takes_parts: bool = False
    """Goes through content part by part; strings are lost on it."""
    takes_absent_content: bool = True
    """Renders an assistant message with tool calls that has no content key."""
    takes_argument_text: bool = False
    """Wants a tool call's arguments as JSON text, not as an object."""


def normalize_messages(messages: Any, traits: TemplateTraits) -> list[Message]:
    """Fresh, plain JSON; content is a string (or absent). Raises `InvalidRequest` naming the message."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message.", "messages", "invalid_value")
    plain = [_message(message, f"messages.{index}", traits) for index, message in enumerate(messages)]
    if not traits.takes_developer and any(message["role"] == "developer" for message in plain):
        return _without_developer(plain)
    return plain


def with_parts(messages: list[Message]) -> list[Message]:
    """For templates that go through parts: each text as a list of one."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if "content" in message else message
        for message in messages
    ]


def plain_json(value: Any, name: str, depth: int = MAX_DEPTH) -> Any:
    """A deep copy out of JSON types alone: what a sandboxed template may see. Raises `InvalidRequest`."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth == 0:
        raise InvalidRequest(f"{name} is nested more than {MAX_DEPTH} levels deep.", name, "invalid_value")
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: plain_json(item, name, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, name, depth - 1) for item in value]
    raise InvalidRequest(f"{name} holds a value that is not JSON ({type(value).__name__}).", name, "invalid_value")


def _message(value: Any, name: str, traits: TemplateTraits) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object.", name, "invalid_value")
    message = {key: item for key, item in plain_json(value, name).items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        message_text = f"{name}.role must be one of {', '.join(ROLES)}; got {role!r:.100}."
        raise InvalidRequest(message_text, name, "invalid_value")
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    elif "tool_calls" in message:
        message["tool_calls"] = [_tool_call(c, f"{name}.tool_calls", traits) for c in _list(message, name)]
    _set_content(message, name, traits)
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _set_content(message: Message, name: str, traits: TemplateTraits) -> None:
    content = message.get("content")
    may_lack = message["role"] == "assistant" and ("tool_calls" in message or "function_call" in message)
    if content is None and "refusal" in message and message["role"] == "assistant":
        content = message["refusal"]
    if content is None and not may_lack:
        raise InvalidRequest(f"{name}.content is required.", f"{name}.content", "missing_required_parameter")
    if isinstance(content, list):
        content = PART_JOINER.join(_part(part, f"{name}.content.{i}") for i, part in enumerate(content)) or None
    if content is None and may_lack and traits.takes_absent_content:
        message.pop("content", None)
        return
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{name}.content must be a string or a list of parts.", f"{name}.content", "invalid_type")
    message["content"] = content or ""


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{name} is of type {kind!r:.100}; this model takes text only.", name, "invalid_value")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}.{kind} must be a string.", name, "invalid_type")
    return text


def _list(message: Message, name: str) -> list[Any]:
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise InvalidRequest(f"{name}.tool_calls must be a list.", f"{name}.tool_calls", "invalid_type")
    return calls


def _tool_call(call: Any, name: str, traits: TemplateTraits) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{name} must hold calls with a function and its name.", name, "invalid_value")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), name, traits)}}


def _arguments(arguments: Any, name: str, traits: TemplateTraits) -> Any:
    if traits.takes_argument_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # a call that was cut off, say: the template gets the text as it is
        return arguments
    return plain_json(value, name) if isinstance(value, dict) else arguments


def _without_developer(messages: list[Message]) -> list[Message]:
    head = 0
    while head < len(messages) and messages[head]["role"] in ("system", "developer"):
        head += 1
    text = INSTRUCTION_JOINER.join(message["content"] for message in messages[:head])
    first = [{**messages[0], "role": "system", "content": text}] if head else []
    rest = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages[head:]]
    return first + rest
