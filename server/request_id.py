"""What a request is called: in its answer's id and headers, in the log, in the KV cache's events."""

import re
import uuid

MAX_CHARS = 128
PATTERN = f"[A-Za-z0-9._:@+=/-]{{1,{MAX_CHARS}}}"
"""Harmless in headers and logs."""
_WORDS = re.compile(PATTERN, re.ASCII)


def is_request_id(text: str | None) -> bool:
    return text is not None and _WORDS.fullmatch(text) is not None


def request_id_from(header: str | None) -> str:
    """`x-request-id` as it came, where it can be an id; a fresh one otherwise, since proxies send what they like."""
    return header if header is not None and is_request_id(header) else uuid.uuid4().hex
