"""What chat and raw completions have in common: model, sampling, streaming, scheduling."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from engine import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS
from server.protocol.body import INT32_MAX, Body, Bool, Float, Int, Int32, TokenId, integer, number
from server.protocol.foreign import ForeignFields
from server.protocol.refusal import expected, shown
from server.request_id import MAX_CHARS, PATTERN, is_request_id


def _biases(values: dict[str, Any]) -> dict[str, Any]:
    """Stops at the first bad one; pydantic has no such thing for objects."""
    if len(values) > MAX_LOGIT_BIAS:
        raise expected(f"an object of at most {MAX_LOGIT_BIAS} entries", f"{len(values)}")
    for key, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise expected("an object of numbers", f"{shown(value)} for {shown(key)}")
        number(value)
    return values


def _request_id(value: str) -> str:
    if not is_request_id(value):
        raise expected(f"1 to {MAX_CHARS} characters out of A-Z a-z 0-9 . _ : @ + = / -")
    return value


MAX_STRINGS = 1024
"""So that long lists cost nothing; the fields' own bounds are lower."""


def _documented(kind: str, **rules: Any) -> WithJsonSchema:
    """For GET /openapi.json: bounds that are checked elsewhere, with sentences of their own."""
    return WithJsonSchema({"type": kind, **rules})


_ID = {"type": "integer", "minimum": 0}
# A list stops at its first bad item: its errors must not outgrow it.
Strings = Annotated[list[str], Field(max_length=MAX_STRINGS, fail_fast=True)]
StopString = Annotated[str, _documented("string", minLength=1, maxLength=512)]
StopStrings = Annotated[
    Strings, _documented("array", items={"type": "string", "minLength": 1, "maxLength": 512}, maxItems=16)
]
BadWords = Annotated[
    Strings, _documented("array", items={"type": "string", "minLength": 1, "maxLength": 512}, maxItems=128)
]
StopIds = Annotated[list[TokenId], Field(fail_fast=True), _documented("array", items=_ID, maxItems=256)]
AllowedIds = Annotated[
    list[TokenId],
    Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True),
    _documented("array", items=_ID, minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS),
]
Biases = Annotated[
    dict[str, Any],
    AfterValidator(_biases),
    _documented(
        "object",
        propertyNames={"pattern": "^[0-9]{1,10}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        maxProperties=MAX_LOGIT_BIAS,
    ),
]
Choices = Annotated[Int, _documented("integer", minimum=1, maximum=128)]
Limit = Annotated[Int, _documented("integer", minimum=0)]
Seed = Annotated[Int, _documented("integer", minimum=-(2**63), maximum=2**63 - 1)]
Temperature = Annotated[Float, _documented("number", minimum=0, maximum=2)]
Mass = Annotated[Float, _documented("number", exclusiveMinimum=0, maximum=1)]
Share = Annotated[Float, _documented("number", minimum=0, maximum=1)]
Penalty = Annotated[Float, _documented("number", minimum=-2, maximum=2)]
Factor = Annotated[Float, _documented("number", minimum=0.01, maximum=100)]
RequestId = Annotated[
    str, AfterValidator(_request_id), _documented("string", minLength=1, maxLength=MAX_CHARS, pattern=f"^{PATTERN}$")
]
Salt = Annotated[str, _documented("string", minLength=1)]
TopK = Annotated[Int32, _documented("integer", minimum=-1, maximum=INT32_MAX)]
Logprobs = Annotated[int, Field(ge=0, le=20), BeforeValidator(integer)]
Truncation = Annotated[
    int,
    Field(ge=-1, le=INT32_MAX),
    BeforeValidator(integer),
    _documented("integer", minimum=-1, maximum=INT32_MAX, **{"not": {"const": 0}}),
]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


class StreamOptions(Body):
    include_usage: Bool | None = None
    """One more chunk before [DONE], with `usage` and no choices."""
    continuous_usage_stats: Bool | None = None
    """`usage` so far on every chunk."""
    include_obfuscation: Bool | None = None
    """Accepted; there is nothing to hide on a local connection."""


class GenerationBody(ForeignFields):
    """Shared request fields. Ranges that belong to sampling are checked by `SamplingParams`."""

    model: str | None = None
    max_tokens: Limit | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: Mass | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: Bool | None = None
    skip_special_tokens: Bool | None = None
    min_tokens: Limit | None = None
    ignore_eos: Bool | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedIds | None = None
    truncate_prompt_tokens: Truncation | None = None
    """Keep the last so many prompt tokens; -1: as many as the window takes."""

    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Bool | None = None
    request_id: RequestId | None = None
    """Becomes the request's id, unless the header `x-request-id` gives it one."""

    priority: Int32 | None = None
    """Lower runs first."""
    cache_salt: Salt | None = None
    """Prompts with different salts share no cache."""
    service_tier: ServiceTier | None = None
    user: str | None = None

    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens, with so many alternatives."""

    # documented, not served: see unsupported.py (other servers' names: foreign.py)
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
