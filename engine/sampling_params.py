"""How one request wants its tokens chosen."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec

from configs.sampling_limits import RANGES
from engine.errors import InvalidRequest, shown

RANDOM_SEED = -1
"""As a seed it is none, as in vLLM and llama.cpp; every other integer is one, negative ones too."""
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_TOKEN_IDS = 65536
_MOST_ENTRIES = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
}


# ------------------------------------------------------------------ kinds of values; numpy's numbers are some too
def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return _is_list(value) and all(isinstance(text, str) for text in value)


def _are_ids(value: Any) -> bool:
    """By the kinds among them: there may be many ids."""
    kinds = set(map(type, value)) if _is_list(value) else {object}
    return bool not in kinds and all(issubclass(kind, Integral) for kind in kinds)


def _are_words(value: Any) -> bool:
    return _is_list(value) and all(map(_are_ids, value))


def _are_biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_integer, value)) and all(map(_is_number, value.values()))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_KINDS = (
    (("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), _is_integer, "an integer"),
    (
        ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        _is_number,
        "a number",
    ),
    (("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), _is_flag, "True or False"),
    (("stop",), _are_texts, "a string or a list of strings"),
    (("stop_token_ids", "allowed_token_ids"), _are_ids, "a list of token ids"),
    (("bad_words",), _are_words, "a list of lists of token ids"),
    (("logit_bias",), _are_biases, "a number for each token id"),
)
"""(fields, whether a value is of their kind, the kind in words)"""
_MAY_BE_NONE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids"}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated on construction; an `InvalidRequest` names the field, the value and the limit.

    Token ids are checked against a vocabulary by `check_vocabulary`, since only the owner of a model knows its size.
    Built in `server/translate.py` or by the offline user. The scheduler reads limits and stop ids only; the runner
    copies the rest once into its request rows.
    """

    n: int = 1
    """Independent completions of the prompt, 1..128."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: up to the context window. Clamped to the window. 0 only beside
    `prompt_logprobs`."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked until this many tokens exist."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """0.01 to 100; divides positive and multiplies negative logits of tokens in prompt or output."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency penalties look at generated tokens only."""
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """(seed, choice index, position) keys the generator; None or `RANDOM_SEED`: each request draws its own seed."""
    stop: tuple[str, ...] = ()
    """One may be given bare."""
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never generated; strings are turned into sequences where the tokenizer is."""
    allowed_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; k: the chosen token's log-probability and the k most likely, of the model's own distribution."""
    prompt_logprobs: int | None = None
    """As `logprobs`, of the prompt's tokens from the second on. Nothing of such a prompt is taken from the cache."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for find in (self._wrong_types, self._problems):
            problems = [InvalidRequest(message, name, "invalid_value") for name, message in find()]
            if problems:
                raise InvalidRequest.first_of(problems)

    def _wrong_types(self) -> Iterator[tuple[str, str]]:
        """(field, sentence) for each value of another kind; Python itself checks none."""
        for names, is_right, words in _KINDS:
            for name in names:
                value = getattr(self, name)
                if not (is_right(value) or (value is None and name in _MAY_BE_NONE)):
                    yield name, f"{name} must be {words}, got {shown(value)}."

    def _token_ids(self) -> dict[str, list[int]]:
        """All of them, by field."""
        return {
            "logit_bias": list(self.logit_bias or ()),
            "stop_token_ids": list(self.stop_token_ids),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "bad_words": [token for word in self.bad_words for token in word],
        }

    def _problems(self) -> Iterator[tuple[str, str]]:
        """(field, sentence) for each thing that is wrong."""
        least = 1 if self.prompt_logprobs is None else 0
        if self.max_tokens is not None and self.max_tokens < least:
            yield "max_tokens", f"max_tokens must be at least {least}, got {shown(self.max_tokens)}."
        elif self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = f"max_tokens ({self.max_tokens})"
            yield "min_tokens", f"min_tokens must be at most {most}, got {shown(self.min_tokens)}."
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                yield name, f"{name} must be {allowed}, got {shown(value)}."
        for name, limit in _MOST_ENTRIES.items():
            size = len(getattr(self, name) or ())
            if size > limit:
                yield name, f"{name} may have at most {limit} entries, got {size}."
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                yield "stop", f"stop strings must have 1 to {MAX_STOP_STRING_CHARS} characters, got one of {len(text)}."
        for token, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:
                given = f"{shown(bias)} for token {shown(token)}"
                yield "logit_bias", f"logit_bias must be between -100 and 100, got {given}."
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            yield "allowed_token_ids", "allowed_token_ids must not be empty."
        if not all(self.bad_words):
            yield "bad_words", "bad_words must not hold an empty string."

    def check_vocabulary(self, size: int) -> None:
        """Raises `InvalidRequest` for any token id outside [0, size)."""
        for name, ids in self._token_ids().items():
            for token in ids:
                if not 0 <= token < size:
                    message = f"{name} holds token id {shown(token)}; ids of this model are 0 to {size - 1}."
                    raise InvalidRequest(message, name, "invalid_value")
