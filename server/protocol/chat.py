"""POST /v1/chat/completions: what comes in."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from server.protocol.body import Body
from server.protocol.sampling import GenerationBody

MAX_MESSAGES = 4096


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
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def length(self) -> int:
        """Characters of its content."""
        if isinstance(self.content, list):
            return sum(len(part.text or "") for part in self.content)
        return len(self.content or "")


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TemplateBody(Body):
    """What decides how a conversation becomes a prompt."""

    messages: Messages | None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    documents: Any = None
    tools: Any = None


class ChatBody(GenerationBody, TemplateBody):
    messages: Messages
    max_completion_tokens: int | None = None
    """Wins over the older `max_tokens`. Absent: up to the window."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    """Handed to the chat template."""

    # documented, not served: see unsupported.py
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    store: Any = None
