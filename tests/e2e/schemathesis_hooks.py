"""Loaded by schemathesis, in its own environment: makes what it generates mean something to the model served.

The document says what a request may look like. That a token id is in the vocabulary, that the model has this name, that
two fields go together, it cannot say; without these repairs nearly every request would be refused and the engine never
reached. Requests that are wrong on purpose stay as they are.
"""

from collections.abc import Callable, Iterator
from typing import Any

import schemathesis
from schemathesis import GenerationMode

VOCABULARY = 256
"""Bytes: the other tokens end texts."""
MOST_CHOICES = 4
MOST_ITEMS = 2
"""Messages, and parts of each: more do not fit into the window."""
ALONE = ("model", "priority", "best_of", "continue_final_message", "chat_template_kwargs", "service_tier")
"""Fields whose values depend on the server's settings or on other fields."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    if case.meta.generation.mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
        case.body = repaired(case.body)


def repaired(body: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in body.items() if name not in ALONE}
    for name in ("prompt", "tokens", "stop_token_ids", "allowed_token_ids"):
        if name in body:
            body[name] = _each(body[name], _known)
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(key) % VOCABULARY): bias for key, bias in body["logit_bias"].items()}
    if isinstance(body.get("messages"), list):
        body["messages"] = [_message(message) for message in body["messages"][:MOST_ITEMS]]
        body.pop("prompt", None)  # /tokenize takes one of the two
    elif "tokens" not in body and not body.get("prompt"):
        body["prompt"] = "Hello"
    return body | dict(_together(body))


def _together(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields that others rule out, with the values they may have then."""
    yield "n", min(body.get("n") or 1, MOST_CHOICES)
    if body.get("prompt_logprobs") is not None:
        yield "stream", False
    if body.get("top_logprobs"):
        yield "logprobs", True
    limits = {name: body[name] or 1 for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    yield from limits.items()
    yield "min_tokens", min([body.get("min_tokens") or 0, *limits.values(), 16])


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": part.get("text") or "Hello"} for part in content[:MOST_ITEMS]]
    return {**message, "content": content or "Hello"}


def _known(value: Any) -> Any:
    if isinstance(value, int | float):
        return int(value) % VOCABULARY
    return "Hello" if value == "" else value


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [_each(item, change) for item in value] if isinstance(value, list) else change(value)
