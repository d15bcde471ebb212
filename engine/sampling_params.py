"""How one request wants its tokens chosen."""

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
REPETITION_PENALTY = (0.01, 100.0)
"""Lowest and highest: beyond them half-precision logits lose their meaning."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Validated on construction; an `InvalidRequest` names the field, the value and the limit.

    Token ids are checked against a vocabulary by `check_vocabulary`, since only the owner of a model knows its size.
    Built in `server/translate.py` or by the offline user. The scheduler reads limits and stop ids only; the runner
    copies the rest once into its request rows.
    """

    n: int = 1
    """Independent completions of the prompt, 1..128."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: up to the context window. Clamped to the window."""
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
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences never generated; strings are turned into sequences where the tokenizer is."""
    allowed_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; k: the chosen token's log-probability and the k most likely, of the model's own distribution."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._range("n", self.n, 1, MAX_N)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens must be at least 1, got {self.max_tokens}.", "max_tokens", "invalid_value"
            )
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise InvalidRequest(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}.",
                "min_tokens",
                "invalid_value",
            )
        self._range("temperature", self.temperature, 0.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}.", "top_p", "invalid_value")
        if self.top_k < -1:
            raise InvalidRequest(
                f"top_k must be -1 (off), 0 (off) or positive, got {self.top_k}.", "top_k", "invalid_value"
            )
        self._range("min_p", self.min_p, 0.0, 1.0)
        self._range("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTY)
        self._range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            self._range("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            self._range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        self._at_most("stop", self.stop, MAX_STOP_STRINGS)
        self._at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self._at_most("logit_bias", self.logit_bias or {}, MAX_LOGIT_BIAS)
        self._at_most("bad_words", self.bad_words, MAX_BAD_WORDS)
        self._at_most("allowed_token_ids", self.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS)
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}.",
                    "stop",
                    "invalid_value",
                )
        for token, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias must be between -100 and 100, got {bias} for token {token}.",
                    "logit_bias",
                    "invalid_value",
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", "allowed_token_ids", "invalid_value")
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words must not hold an empty string.", "bad_words", "invalid_value")

    def check_vocabulary(self, size: int) -> None:
        """Raises `InvalidRequest` for any token id outside [0, size)."""
        fields: dict[str, list[int]] = {
            "logit_bias": list(self.logit_bias or ()),
            "stop_token_ids": list(self.stop_token_ids),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name, ids in fields.items():
            for token in ids:
                if not 0 <= token < size:
                    raise InvalidRequest(
                        f"{name} holds token id {token}; ids of this model are 0 to {size - 1}.", name, "invalid_value"
                    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @staticmethod
    def _range(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # also refuses NaN
            raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value}.", name, "invalid_value")

    @staticmethod
    def _at_most(name: str, values: tuple[object, ...] | dict[int, float], limit: int) -> None:
        if len(values) > limit:
            raise InvalidRequest(f"{name} may have at most {limit} entries, got {len(values)}.", name, "invalid_value")
