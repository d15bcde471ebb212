"""Ids to text, one by one, without broken characters (A02).

A part of a character is held back until the rest comes (three bytes at most); what can never become a character turns
into U+FFFD at once, one for each maximal ill-formed part (Unicode, section 3.9). Cost per token: its bytes.
"""

import codecs
from collections.abc import Container
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from engine.text.token_bytes import TokenBytes

MAX_HELD_TOKENS = 8
"""More tokens than any character has bytes: what is held longer is broken."""


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Text that this token completes; often empty."""

    def flush(self) -> str:
        """At the end: what was held back, as one U+FFFD at most."""


class ByteDetokenizer:
    """For vocabularies under which a text is the concatenation of its tokens' bytes."""

    def __init__(self, token_bytes: TokenBytes, skipped: Container[int], at_start: bool) -> None:
        """`skipped`: ids without text. `at_start`: nothing visible stands before this text."""
        self._token_bytes, self._skipped = token_bytes, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = at_start and token_bytes.strips_space

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._strip(self._decoder.decode(self._token_bytes[token_id]))

    def flush(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            text = text.removeprefix(" ")
        return text


class LibraryDetokenizer:
    """For all other decoders: the tokenizers library's DecodeStream.

    It withholds for as long as its text ends in U+FFFD, also where that is no partial character, and it raises where
    the text before changes with the next token; both are bounded here.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skipped: Container[int]) -> None:
        self._backend, self._skipped = backend, skipped
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # the library raises plain Exception ("Invalid prefix encountered")
            return self.flush()
        if text is not None:
            self._held.clear()
            return text
        return self.flush() if len(self._held) >= MAX_HELD_TOKENS else ""

    def flush(self) -> str:
        text = self._backend.decode(self._held, skip_special_tokens=False)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held.clear()
        return text
