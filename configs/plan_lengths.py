"""How long requests are: read from a trace, or assumed.

A trace is a file of JSON objects, one a line, each with a request's prompt and output in tokens, under one of `KEYS`.
Octavo's own log (--log-format json) is one. Other lines are passed over, and requests that did not come to their end.
"""

import json
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from configs.errors import SettingsError, shown
from configs.files import open_text

LOG_KEYS = ("prompt_tokens", "generated_tokens")
"""Of Octavo's log."""
KEYS = (("prompt_tokens", "completion_tokens"), LOG_KEYS, ("input_length", "output_length"))
"""(of the prompt, of the output): OpenAI's usage, Octavo's log, Mooncake's traces (arXiv:2407.00079)"""
ASSUMED_P50, ASSUMED_P95 = 1024, 4096
"""Prompt and output together, where no trace is given: a log-normal distribution with these quantiles."""
POINTS = 1000
"""The assumed distribution is cut into so many equally likely parts."""


@dataclass(frozen=True)
class Lengths:
    """Prompt and output together, in tokens, ascending, of every request."""

    tokens: tuple[int, ...]
    source: str
    """Where they come from, in words."""
    num_cut: int = 0
    """Requests that were longer than the window."""

    @property
    def p50(self) -> int:
        return self.quantile(0.5)

    @property
    def p95(self) -> int:
        return self.quantile(0.95)

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    def quantile(self, share: float) -> int:
        """The shortest length that at least this share of the requests do not exceed."""
        return self.tokens[math.ceil(round(share * len(self.tokens), 6)) - 1]

    def within(self, window: int) -> "Lengths":
        """As they are where sequences end at `window` tokens."""
        cut = sum(count > window for count in self.tokens)
        return Lengths(tuple(min(count, window) for count in self.tokens), self.source, cut)


def assumed_lengths() -> Lengths:
    """As good as nothing is known: half of all requests of at most 1,024 tokens, one in twenty longer than 4,096."""
    normal = NormalDist(math.log(ASSUMED_P50), math.log(ASSUMED_P95 / ASSUMED_P50) / NormalDist().inv_cdf(0.95))
    tokens = tuple(round(math.exp(normal.inv_cdf(part / POINTS))) for part in range(1, POINTS))
    return Lengths(tokens, f"assumed: log-normal, half at most {ASSUMED_P50:,} tokens, 95 % at most {ASSUMED_P95:,}")


def read_lengths(path: str) -> Lengths:
    """Raises `SettingsError` for a file that is no trace, naming line and value."""
    with open_text("--lengths", path) as file:
        totals = [_total(line, f"{path}: line {number}") for number, line in enumerate(file, 1) if line.strip()]
    tokens = sorted(filter(None, totals))
    if not tokens:
        pairs = ", or ".join(f"{prompt} and {output}" for prompt, output in KEYS)
        raise SettingsError(
            f"--lengths {path} has no line that is a JSON object with {pairs}: each must stand on a line of its own, "
            "without a list around them."
        )
    words = f"{path}: {len(tokens):,} request{'s' * (len(tokens) > 1)}"
    if others := len(totals) - len(tokens):
        words += f"; {others:,} other line{'s' * (others > 1)} passed over"
    return Lengths(tuple(tokens), words)


def _total(line: str, place: str) -> int | None:
    """Tokens of a request, prompt and output; None for a line that is passed over. `place`: of it, in words."""
    record = _record(line)
    keys = next((pair for pair in KEYS if pair[0] in record and pair[1] in record), None)
    if keys is None or (keys == LOG_KEYS and not _is_whole(record)):
        return None
    total = 0
    for key in keys:
        value = record[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise SettingsError(f"--lengths {place}: {key} must be a count of tokens, got {shown(value)}.")
        total += value
    return total or None


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether a line of Octavo's log is of one sequence (of several it has the sum alone) that came to its end."""
    ended = record.get("status", 200) == 200 and record.get("finish_reason", "stop") in ("stop", "length")
    return ended and record.get("sequences", 1) == 1


def _record(line: str) -> dict[str, Any]:
    """{} for a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    usage = record.get("usage")
    return usage if isinstance(usage, dict) else record
