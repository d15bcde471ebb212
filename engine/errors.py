"""Every error that Octavo raises on purpose. Messages are written for the person who can act on them."""

from collections.abc import Sequence
from typing import Literal

from configs.errors import OctavoError as OctavoError
from configs.errors import StartupError as StartupError
from configs.errors import reason_of as reason_of
from configs.errors import shown as shown

MAX_NAMED = 5
"""Fields that one message names besides the first."""


class InvalidRequest(OctavoError):
    """The client's fault: HTTP 400.

    `param` names the request field, `code` is OpenAI's error code where one fits; of several prompts, `prompt` is the
    number of the one it is about.
    """

    prompt: int | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code

    @classmethod
    def first_of(cls, errors: "Sequence[InvalidRequest]") -> "InvalidRequest":
        """The first; its message names the fields of the others."""
        first = errors[0]
        names = list(dict.fromkeys(error.param for error in errors[1:] if error.param not in (None, first.param)))
        if not names:
            return first
        rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        message = f"{first.message} Also wrong: {', '.join(map(str, names[:MAX_NAMED]))}{rest}."
        return cls(message, first.param, first.code)


class ContextLengthExceeded(InvalidRequest):
    """The prompt leaves no room for a single token. Clients match the sentence's start and the code.

    `at_least`: the prompt was not tokenised, and `prompt_tokens` is a lower bound.
    """

    def __init__(self, limit: int, prompt_tokens: int, param: str | None = None, *, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your prompt has "
            f"{'at least ' if at_least else ''}{prompt_tokens} tokens, "
            "which leaves no room for output. Please shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )


class Overloaded(OctavoError):
    """The queue is full: HTTP 503 with Retry-After. `reason` labels the metric, e.g. 'max_num_queued_reqs'."""

    def __init__(self, message: str, retry_after: float, reason: str) -> None:
        super().__init__(message)
        self.message, self.retry_after, self.reason = message, retry_after, reason


class NotReady(OctavoError):
    """The engine is loading or draining: HTTP 503. `phase` is 'loading' or 'draining'."""

    def __init__(self, message: str, phase: str) -> None:
        super().__init__(message)
        self.message, self.phase = message, phase


class EngineDead(OctavoError):
    """The engine process is gone or hangs: every open request fails with this, /health turns 503."""


class RequestFailed(OctavoError):
    """One request failed inside the engine; the others go on. HTTP 500, or an error frame in a stream."""


class RequestAborted(RequestFailed):
    """One request was ended on purpose, though its client has not gone: by an operator, or since its reader stalled."""


def ending(error: Exception) -> Literal["abort", "error"]:
    """How requests and sequences are counted that `error` ends: what was broken off, or what went wrong."""
    return "abort" if isinstance(error, RequestAborted | NotReady) else "error"
