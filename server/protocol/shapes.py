"""The shapes of answers, for GET /openapi.json and whoever generates a client from it.

The routes write their JSON without these models, since a chunk a token must cost little; tests hold every answer
against them. A field that stands here without a default is in every answer.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


class Shape(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(use_attribute_docstrings=True)


# ---------------------------------------------------------------------- errors
class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    """Dotted path of the field that is at fault."""
    code: str | None


class ErrorAnswer(Shape):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


# ---------------------------------------------------------------------- generation
class CachedTokens(Shape):
    cached_tokens: int = Field(ge=0)
    """Prompt tokens that the cache had."""


class ReasoningTokens(Shape):
    reasoning_tokens: int = Field(ge=0)


class UsageShape(Shape):
    """Tokens; each prompt counts once, whatever `n` is."""

    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class PromptTokenLogprob(Shape):
    logprob: float
    rank: int = Field(ge=1)
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""By token id, for each prompt token; null for the first."""


class TokenAlternative(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenAlternative):
    top_logprobs: list[TokenAlternative] = Field(max_length=20)


class ChatLogprobs(Shape):
    content: list[ChatToken]
    refusal: None


class Generated(Shape):
    """What every answer and every chunk begins with."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    service_tier: str | None = None
    """As asked for."""
    system_fingerprint: str
    """Changes when the numerics may."""


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int = Field(ge=0)
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token's id or the stop string that ended it."""
    token_ids: list[int] | None = None
    """If `return_token_ids` asked for them."""


class ChatCompletion(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageShape
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(Shape):
    role: Literal["assistant"] | None = None
    """In a choice's first chunk."""
    content: str | None = None


class ChatChunkChoice(Shape):
    index: int = Field(ge=0)
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Generated):
    """One `data:` line of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageShape | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextPart(Shape):
    index: int = Field(ge=0)
    text: str
    logprobs: TextLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextChoice(TextPart):
    finish_reason: FinishReason
    stop_reason: int | str | None


class Completion(Generated):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageShape


class TextChunkChoice(TextPart):
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class CompletionChunk(Generated):
    """One `data:` line of a streamed raw completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: UsageShape | None = None


# ---------------------------------------------------------------------- models and tokens
class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    """Null while the model loads."""


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Shape):
    count: int = Field(ge=0)
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


# ---------------------------------------------------------------------- operation
class Healthy(Shape):
    status: Literal["ok"]
    phase: Literal["ready", "loading", "draining"]


class Unavailable(ErrorAnswer):
    status: Literal["unavailable"]
    phase: Literal["loading", "draining", "dead", "overloaded"]
    detail: str | None = None
    """What is being done while loading."""
    progress: float | None = None


class VersionAnswer(Shape):
    version: str


class CacheShape(Shape):
    block_size: int
    dtype: str
    max_model_len: int
    enable_prefix_caching: bool
    scales: str | None
    fitted_layers: int
    divergence: float | None
    agreement: float | None
    refresh_interval: int | None


class KVEvent(Shape):
    """The numbers beside these belong to its kind: docs/api.md."""

    model_config = ConfigDict(extra="allow")

    step: int
    kind: str
    reason: str
    request_id: str | None


class KVShape(Shape):
    model: str
    total_pages: int
    used_pages: int
    cached_pages: int
    free_pages: int
    utilization: float
    slot_utilization: float
    active_requests: int
    bytes_per_page: int
    bytes_per_token: int
    total_bytes: int
    shared_pages: int
    stored_tokens: int
    window_utilization: float
    waiting_requests: int
    waiting_tokens: int
    step_tokens: int
    cache: CacheShape
    counters: dict[str, int | float | dict[str, int]]
    """By name; some by reason."""
    events: list[KVEvent]
    """Newest last."""


class Aborted(Shape):
    aborted_sequences: int = Field(ge=0)


class Evicted(Shape):
    evicted_pages: int = Field(ge=0)


class ServerLoad(Shape):
    server_load: int = Field(ge=0)


class ServerInfo(Shape):
    version: str
    phase: str
    models: list[str]
    engine: dict[str, str]
    """The start-up block."""
    settings: dict[str, Any]


ANSWERS: tuple[type[Shape], ...] = (
    ErrorAnswer,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ModelList,
    ModelCard,
    Tokenized,
    Detokenized,
    Healthy,
    Unavailable,
    VersionAnswer,
    KVShape,
    Aborted,
    Evicted,
    ServerLoad,
    ServerInfo,
)
