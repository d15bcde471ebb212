"""What chat and raw completions have in common: model, sampling, streaming, scheduling."""

from typing import Annotated, Any

from pydantic import Field

from server.protocol.body import Body

INT32_MAX = 2**31 - 1

# A list stops at its first bad item: its errors must not outgrow it.
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[int], Field(fail_fast=True)]
Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]


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
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ints | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Ints | None = None
    truncate_prompt_tokens: Int32 | None = Field(None, ge=-1)
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
    service_tier: str | None = None
    user: str | None = None

    # documented, not served: see unsupported.py
    echo: Any = None
    prompt_logprobs: Any = None
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
