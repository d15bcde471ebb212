"""How one request wants its tokens chosen."""

from collections.abc import Iterator
from numbers import Integral, Real

import msgspec

from engine.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_TOKEN_IDS = 65536
_INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_RANGES = {
    "n": (1, MAX_N),
    "temperature": (0, 2),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),  # beyond them half-precision logits lose their meaning
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
}
_MOST_ENTRIES = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
}


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
    """(seed, choice index, position) keys the generator; None: each request draws its own seed."""
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
        for names, kind, words in ((_INTEGERS, Integral, "an integer"), (_NUMBERS, Real, "a number")):
            for name in names:
                value = getattr(self, name)
                if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                    yield name, f"{name} must be {words}, got {value!r:.60}."
        if not all(isinstance(text, str) for text in self.stop):
            yield "stop", f"stop must be strings, got {self.stop!r:.60}."
        for name, ids in self._token_ids().items():
            if not all(issubclass(kind, Integral) for kind in set(map(type, ids))):
                yield name, f"{name} must hold token ids, got {getattr(self, name)!r:.60}."

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
        if self.min_tokens < 0:
            yield "min_tokens", f"min_tokens must be at least 0, got {self.min_tokens}."
        if self.max_tokens is not None and self.max_tokens < least:
            yield "max_tokens", f"max_tokens must be at least {least}, got {self.max_tokens}."
        elif self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = f"max_tokens ({self.max_tokens})"
            yield "min_tokens", f"min_tokens must be at most {most}, got {self.min_tokens}."
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                yield name, f"{name} must be between {low} and {high}, got {value}."
        if not 0.0 < self.top_p <= 1.0:
            yield "top_p", f"top_p must be above 0 and at most 1, got {self.top_p}."
        if self.top_k < -1:
            yield "top_k", f"top_k must be -1 (off), 0 (off) or positive, got {self.top_k}."
        for name, limit in _MOST_ENTRIES.items():
            size = len(getattr(self, name) or ())
            if size > limit:
                yield name, f"{name} may have at most {limit} entries, got {size}."
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                yield "stop", f"stop strings must have 1 to {MAX_STOP_STRING_CHARS} characters, got one of {len(text)}."
        for token, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:
                yield "logit_bias", f"logit_bias must be between -100 and 100, got {bias} for token {token}."
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            yield "allowed_token_ids", "allowed_token_ids must not be empty."
        if not all(self.bad_words):
            yield "bad_words", "bad_words must not hold an empty string."

    def check_vocabulary(self, size: int) -> None:
        """Raises `InvalidRequest` for any token id outside [0, size)."""
        for name, ids in self._token_ids().items():
            for token in ids:
                if not 0 <= token < size:
                    raise InvalidRequest(
                        f"{name} holds token id {token}; ids of this model are 0 to {size - 1}.", name, "invalid_value"
                    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
