"""What chat and raw completions have in common: model, sampling, streaming, scheduling."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from engine import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS
from server.protocol.body import INT32_MAX, Body, Float, Int, Int32, TokenId, integer, number
from server.protocol.refusal import expected, shown


def _biases(values: dict[str, Any]) -> dict[str, Any]:
    """Stops at the first bad one; pydantic has no such thing for objects."""
    if len(values) > MAX_LOGIT_BIAS:
        raise expected(f"an object of at most {MAX_LOGIT_BIAS} entries", f"{len(values)}")
    for key, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise expected("an object of numbers", f"{shown(value)} for {shown(key)}")
        number(value)
    return values


MAX_STRINGS = 1024
"""So that long lists cost nothing; the fields' own bounds are lower."""

# A list stops at its first bad item: its errors must not outgrow it.
Strings = Annotated[list[str], Field(max_length=MAX_STRINGS, fail_fast=True)]
Ints = Annotated[list[TokenId], Field(fail_fast=True)]
AllowedIds = Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
Biases = Annotated[
    dict[str, Any],
    AfterValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Logprobs = Annotated[int, Field(ge=0, le=20), BeforeValidator(integer)]
Truncation = Annotated[int, Field(ge=-1, le=INT32_MAX), BeforeValidator(integer)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


class StreamOptions(Body):
    include_usage: bool | None = None
    """One more chunk before [DONE], with `usage` and no choices."""
    continuous_usage_stats: bool | None = None
    """`usage` so far on every chunk."""
    include_obfuscation: bool | None = None
    """Accepted; there is nothing to hide on a local connection."""


class GenerationBody(Body):
    """Shared request fields. Ranges that belong to sampling are checked by `SamplingParams`."""

    model: str | None = None
    max_tokens: Int | None = None
    n: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int32 | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: Biases | None = None
    seed: Int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: AllowedIds | None = None
    truncate_prompt_tokens: Truncation | None = None
    """Keep the last so many prompt tokens; -1: as many as the window takes."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    """Becomes part of the answer's id."""

    priority: Int32 | None = None
    """Lower runs first."""
    cache_salt: str | None = None
    """Prompts with different salts share no cache."""
    service_tier: ServiceTier | None = None
    user: str | None = None

    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens, with so many alternatives."""

    # documented, not served: see unsupported.py
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)
