"""The bytes behind each token id, by the rules of the tokenizer's decoder.

Byte-level vocabularies (GPT-2, Llama 3, Qwen) spell bytes as printable characters; SentencePiece ones (Llama 2) write
"▁" for a space and `<0x0A>` for a byte. Under both, a text is its tokens' bytes put together, so streaming needs no
look back at earlier tokens.
"""

import json
import re
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
STEPS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip"}
"""Decoders that work token by token, and Strip, which takes a space off the start of the text."""


class TokenBytes(dict[int, bytes]):
    """id -> bytes, filled as ids are asked for. Ids outside the vocabulary have none."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        steps = _steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self.concatenates = bool(kinds) and kinds <= STEPS and all(map(_is_simple, steps))
        """Whether a text is its tokens' bytes put together; else a token's bytes are what it decodes to alone."""
        self._backend = backend
        self._added = backend.get_added_tokens_decoder().keys()
        self._byte_of = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and _is_simple(step)
        ]
        self.strips_space = "Strip" in kinds
        """Whether a text that starts with a space loses it (SentencePiece puts one before the first word)."""

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = value = self._find(token_id)
        return value

    def _find(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if not self.concatenates:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        if self._byte_of is not None:
            if token_id in self._added:  # spelled in plain text
                return token.encode()
            values = [self._byte_of.get(char) for char in token]
            return token.encode() if None in values else bytes(v for v in values if v is not None)
        if self._has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _is_simple(step: dict[str, Any]) -> bool:
    """Not a replacement of a regular expression, nor a strip of more than one space at the start."""
    if step["type"] == "Strip":
        return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
    return step["type"] != "Replace" or "String" in step["pattern"]


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the rest as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
