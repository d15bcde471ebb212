"""POST /tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated

from pydantic import Field

from server.protocol.body import Body, Bool, TokenId
from server.protocol.chat import Messages, TemplateBody

MAX_TOKENS = 1 << 20
"""That /detokenize takes."""


class TokenizeBody(TemplateBody):
    """Either `prompt` or `messages`."""

    messages: Messages | None = None
    model: str | None = None
    prompt: str | None = Field(None, examples=["The capital of France is"])
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True, examples=[[72, 105]])]
