"""POST /v1/chat/completions: what comes in."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from server.protocol.body import Body, Bool, Int
from server.protocol.sampling import GenerationBody, Logprobs

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 16384
"""Over all messages of a request."""
MAX_TOOL_CALLS = 1024
"""In one message."""
MAX_TEMPLATE_VALUES = 1 << 17
"""Values of all kinds and depths in the messages and in `chat_template_kwargs`, that a template may go through."""


class Lenient(Body):
    """Keys that are not listed are handed on to the chat template."""

    model_config = ConfigDict(extra="allow")


class ContentPart(Lenient):
    """Text, or a refusal that an assistant message repeats. The chat renderer refuses any other type."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Lenient):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Lenient):
    """A call that an earlier answer made, in the conversation's history."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(Lenient):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def num_parts(self) -> int:
        return len(self.content) if isinstance(self.content, list) else 0


Messages = Annotated[
    list[Message],
    Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        examples=[[{"role": "user", "content": "What is an octavo?"}]],
    ),
]


class TemplateBody(Body):
    """What decides how a conversation becomes a prompt."""

    messages: Messages | None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Handed to the chat template."""
    chat_template: Any = None
    documents: Any = None
    tools: Any = None
    enable_thinking: Any = None


class ChatBody(GenerationBody, TemplateBody):
    messages: Messages
    max_completion_tokens: Int | None = None
    """Wins over the older `max_tokens`. Absent: up to the window."""
    logprobs: Bool | None = None
    top_logprobs: Logprobs | None = None

    # documented, not served: see unsupported.py
    tool_choice: Any = None
    echo: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    store: Any = None
