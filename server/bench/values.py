"""What a server says, as values: its JSON is believed in nothing, and its words are made fit for a terminal."""

import json
from typing import Any

from configs.errors import shown

MAX_COUNT = 10**9
"""Tokens: no server has a longer window, or counts more of one request."""
MAX_WORDS = 300
"""Characters of an error that are shown."""


def parse(content: bytes) -> Any:
    """Raises ValueError for what is no JSON, or lists in lists in lists."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def count(value: Any) -> int | None:
    """Of tokens; None stays None. Raises ValueError for anything else than a whole number from 0 to `MAX_COUNT`."""
    if value is not None and not (type(value) is int and 0 <= value <= MAX_COUNT):
        raise ValueError(f"{shown(value)} is no number of tokens")
    return value


def windows_of(content: bytes) -> dict[str, int | None]:
    """The list of models: each one's name, and its `max_model_len` where that is the length of a window. Raises
    ValueError, TypeError, KeyError or AttributeError if it is of another shape."""
    return {str(card["id"]): _window(card.get("max_model_len")) for card in parse(content)["data"]}


def _window(value: Any) -> int | None:
    try:
        return count(value) or None
    except ValueError:
        return None


def num_tokens(content: bytes) -> int:
    """Of an answer of /tokenize. Raises ValueError, TypeError or KeyError if it is of another shape."""
    tokens = parse(content)["tokens"]
    if not isinstance(tokens, list):
        raise TypeError("tokens are no list")
    return len(tokens)


def error_words(content: bytes) -> str:
    """What the body of a refusal says, in JSON or not."""
    try:
        return words_of(parse(content))
    except ValueError:
        return content.decode(errors="replace")


def words_of(body: Any) -> str:
    """What an error's JSON says: `error.message`, `message` or `detail`."""
    error = body.get("error", body) if isinstance(body, dict) else body
    said = ((error.get("message") or error.get("detail")) if isinstance(error, dict) else None) or error
    return said if isinstance(said, str) else shown(said, MAX_WORDS)


def printable(text: str) -> str:
    """Escaped where a terminal would obey, and where it could not be written: control characters, half surrogates."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
