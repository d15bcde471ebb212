"""What chat and raw completions have in common on the way out: the constant parts of an answer, and SSE framing.

A chunk is a constant head, the choices and a tail. Head and tail are made once a request, so that a token costs the
encoding of its text and two concatenations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine import TextDelta
from server.generation import Choice, Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

encode = msgspec.json.encode


@dataclass(frozen=True)
class AnswerInfo:
    """The same in every chunk of an answer."""

    id: str
    model: str
    created: int
    """Unix seconds."""
    fingerprint: str
    """Changes when the numerics may."""
    service_tier: str | None
    include_usage: bool
    running_usage: bool
    return_token_ids: bool
    prompt_token_ids: list[list[int]]

    def head(self, kind: str) -> dict[str, Any]:
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        if self.service_tier is not None:
            fields["service_tier"] = self.service_tier
        return {**fields, "system_fingerprint": self.fingerprint}


class Answer(Protocol):
    """Renders one request's deltas, streamed or whole."""

    def frames(self, delta: TextDelta, usage: Usage) -> bytes:
        """SSE frames of a delta; may be empty while text is held back."""

    def last_frames(self, usage: Usage) -> bytes:
        """What follows the last delta, [DONE] included."""

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer in one piece."""


class Framing:
    """Builds SSE frames around rendered choices."""

    def __init__(self, info: AnswerInfo, kind: str) -> None:
        self._info = info
        self._head = b"data: " + encode(info.head(kind))[:-1]
        self._tail = b'],"usage":null}\n\n' if info.include_usage else b"]}\n\n"

    def frame(self, choice: bytes, usage: Usage, extra: bytes = b"") -> bytes:
        """`choice` and `extra` are JSON; extra is b'' or b',"name":value…' for the chunk itself."""
        tail = self._tail
        if self._info.running_usage:
            tail = b'],"usage":' + encode(usage.body()) + b"}\n\n"
        return self._head + extra + b',"choices":[' + choice + tail

    def last_frames(self, usage: Usage) -> bytes:
        if not self._info.include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + encode(usage.body()) + b"}\n\n" + DONE
