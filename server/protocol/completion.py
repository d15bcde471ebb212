"""POST /v1/completions: what comes in."""

from typing import Annotated, Any

from pydantic import FailFast, Field

from server.protocol.sampling import GenerationBody

MAX_PROMPTS = 512

# Fail fast: a list of one kind is tried as each of the three, and must not bring an error for every item.
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS), FailFast()]
TokenIds = Annotated[list[int], FailFast()]
TokenLists = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), FailFast()]


class CompletionBody(GenerationBody):
    prompt: str | Texts | TokenIds | TokenLists
    """A text, texts, token ids, or lists of token ids."""
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    """Only the value of `n`: picking the best of more is not served."""
    add_special_tokens: bool | None = None

    # documented, not served: see unsupported.py
    suffix: Any = None
