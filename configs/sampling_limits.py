"""What sampling values may be, wherever they come from: a request, or the defaults that a model's authors chose."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; NaN is in none. As text: what such a number must be."""

    low: float
    high: float = math.inf
    above: bool = False
    """`low` itself is outside."""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.above:
            return f"above {self.low} and at most {self.high}"
        return f"at least {self.low}" if self.high == math.inf else f"between {self.low} and {self.high}"


RANGES = {
    "n": Range(1, 128),
    "min_tokens": Range(0),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(-1),  # -1 and 0: off
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 100),  # beyond them half-precision logits lose their meaning
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**63 - 1),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
}
"""By field of `SamplingParams`; those of generation_config.json have the same names."""
