"""POST /v1/completions: what comes in."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from server.protocol.body import Bool, Int, TokenId
from server.protocol.refusal import EXPECTED
from server.protocol.sampling import GenerationBody, Logprobs

MAX_PROMPTS = 512

Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
TokenLists = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]


def _kind(prompt: object) -> str | None:
    """Which of the four a prompt is, by its first item: errors then are about that one."""
    if isinstance(prompt, list):
        first = prompt[0] if prompt else None
        return "Texts" if isinstance(first, str) else "TokenLists" if isinstance(first, list) else "TokenIds"
    return "Text" if isinstance(prompt, str) else None


Prompt = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[Texts, Tag("Texts")]
    | Annotated[TokenIds, Tag("TokenIds")]
    | Annotated[TokenLists, Tag("TokenLists")],
    Discriminator(_kind, custom_error_type=EXPECTED, custom_error_message="a text, texts, token ids or lists of them"),
]


class CompletionBody(GenerationBody):
    prompt: Prompt = Field(examples=["The capital of France is"])
    """A text, texts, token ids, or lists of token ids."""
    logprobs: Logprobs | None = None
    echo: Bool | None = None
    """The answer begins with the prompt, its log-probabilities included where `logprobs` are asked for."""
    best_of: Int | None = None
    """Only the value of `n`: picking the best of more is not served."""
    add_special_tokens: Bool | None = None

    # documented, not served: see unsupported.py
    suffix: Any = None
