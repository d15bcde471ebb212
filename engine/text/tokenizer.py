"""Text to token ids and back. No torch, no transformers: the API process imports this.

Three ways in, one for each degree of trust:

    encode          raw completions: control tokens written in the text are parsed
    encode_plain    nothing in the text becomes a control token
    encode_trusted  a rendered chat: control tokens are parsed except where the caller says they are somebody's words

A control token is any added token that is not mere whitespace, special or not (`<tool_call>` and `<think>` are not).
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tokenizers

from engine.errors import ContextLengthExceeded, InvalidRequest, StartupError
from engine.source import ModelSource
from engine.text.detokenizer import ByteDetokenizer, Detokenizer, LibraryDetokenizer
from engine.text.gguf_tokenizer import SPACE, gguf_end_ids, read_gguf
from engine.text.token_bytes import TokenBytes, byte_level_alphabet
from engine.text.tokenizer_files import TokenizerParts, generation_end_ids, read_folder, vocabulary_size

LONG_TEXT = 1024
"""Characters from which a text is encoded without the interpreter's lock, so that other threads go on."""
MAX_TEXT_CHARS = 1 << 20
MAX_CHARS_PER_TOKEN = 16
"""A text may be as long as the window's tokens times this, if that is more. Usual are 3 to 5."""
PIECE = 1 << 14
"""Characters that one search of a long text covers: it holds the interpreter's lock, at 40 ns a character at worst."""
NFC_SHRINKS = 4
"""Canonical composition makes a text shorter by this factor at most, in UTF-8 (Unicode, section 3.11)."""


class Tokenizer:
    """`vocab_size` counts added tokens; ids run from 0 to `vocab_size - 1`."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend = parts.backend
        self.named_tokens = parts.named_tokens
        self.chat_template = parts.chat_template
        self.eos_token_ids = parts.eos_token_ids
        bos = parts.named_tokens.get("bos_token")
        self.bos_token_id = None if bos is None else self.backend.token_to_id(bos)
        self.adds_bos = parts.add_bos and self.bos_token_id is not None
        self.vocab_size = vocabulary_size(self.backend)

        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        markup = [(index, token) for index, token in added.items() if not _is_blank(token.content)]
        self._control = {token.content: (index, token) for index, token in markup}
        self._control_ids = frozenset(index for index, _ in self._control.values())
        longest_first = sorted(self._control, key=len, reverse=True)
        self._longest_control = len(longest_first[0]) if longest_first else 1
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._plain, self._plain_inside = _plain_tokenizers(self.backend, self._control)
        self._bytes = TokenBytes(self.backend)
        self._token_limit = _longest_token(self.backend)

    @classmethod
    def load(cls, source: ModelSource) -> "Tokenizer":
        """Reads tokenizer.json of a folder, or a GGUF's metadata. Raises `StartupError`."""
        tokenizer = cls(_replaced(source) if source.tokenizer else _own(source))
        if not tokenizer.eos_token_ids:
            raise StartupError(f"--model {source.name} names no end-of-sequence token, so nothing would ever end.")
        return tokenizer

    # ------------------------------------------------------------------ text -> ids
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Parses control tokens in `text`. With `add_special_tokens`, BOS stands in front, once, if the model uses one.

        Raises `InvalidRequest` for text that is not valid Unicode (lone surrogates).
        """
        ids = _encode(self.backend, text)
        if add_special_tokens and self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)  # type: ignore[arg-type]  # adds_bos says there is one
        return ids

    def check_fits(self, text: str, window: int | None) -> None:
        """Raises `ContextLengthExceeded` where `text` certainly has `window` tokens or more, told by its length alone.
        None: no limit."""
        if window is None or self._token_limit is None or len(text) * 4 <= window * self._token_limit[0]:
            return
        longest, dropped = self._token_limit
        at_least = -(-len(text.encode("utf-8", "replace").translate(None, dropped)) // longest)
        if at_least > window:
            raise ContextLengthExceeded(window, at_least, at_least=True)

    def check_length(self, text: str, window: int | None) -> None:
        """Raises `InvalidRequest` for a text that is not to be tokenised even to be counted or cut: what that takes in
        memory is some 200 bytes a character."""
        limit = max(MAX_TEXT_CHARS, MAX_CHARS_PER_TOKEN * (window or 0))
        if len(text) > limit:
            raise InvalidRequest(
                f"The text has {len(text)} characters; at most {limit} are tokenised at once.",
                None,
                "string_above_max_length",
            )

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as words: nothing in it is a control token, no BOS. Raises `InvalidRequest` as `encode`."""
        return self._without_control(_encode(self._plain, text))

    def encode_trusted(self, text: str, words: Collection[int] = ()) -> list[int]:
        """Ids of a rendered chat. `words`: which control tokens in `text` somebody typed, so that they stay words
        (numbers from 0, in the order of `find_control`). No BOS is added: chat templates write it."""
        ids: list[int] = []
        start, strip_left = 0, False
        for number, match in enumerate(self.find_control(text)):
            if number in words:
                continue
            index, token = self._control[match.group()]
            between = text[start : match.start()]
            ids += self._encode_between(between.rstrip() if token.lstrip else between, strip_left, start == 0)
            ids.append(index)
            start, strip_left = match.end(), token.rstrip
        return ids + self._encode_between(text[start:], strip_left, start == 0)

    def find_control(self, text: str) -> Iterator[re.Match[str]]:
        """Control tokens written in `text`, in order: leftmost, then longest. Lets other threads go on meanwhile."""
        place = 0
        while place < len(text):
            border = place + PIECE
            match = self._control_pattern.search(text, place, border + self._longest_control - 1)
            if match is None or match.start() >= border:
                place = border
            else:
                yield match
                place = match.end()

    def _encode_between(self, text: str, strip_left: bool, at_start: bool) -> list[int]:
        """Text between two control tokens, as the full tokenizer encodes it there."""
        if strip_left:
            text = text.lstrip()
        return self._without_control(_encode(self._plain if at_start else self._plain_inside, text)) if text else []

    def _without_control(self, ids: list[int]) -> list[int]:
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequest(
                "The text spells a control token that this model's tokenizer cannot take as words.",
                None,
                "invalid_value",
            )
        return ids

    # ------------------------------------------------------------------ ids -> text
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """What `stream` brings, all at once. Broken UTF-8 becomes U+FFFD; ids outside the vocabulary, nothing."""
        stream = self.stream(skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """Turns ids into text one by one. `after`: the prompt's ids (its last one is enough)."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if not self._bytes.concatenates:
            return LibraryDetokenizer(self.backend, skipped)
        at_start = not after or after[-1] in self.special_ids
        return ByteDetokenizer(self._bytes, skipped, at_start)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; several tokens may share a character's bytes."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token on its own, with U+FFFD where it holds parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids


def _own(source: ModelSource) -> TokenizerParts:
    return read_gguf(source.path) if source.is_gguf else read_folder(source.path)


def _replaced(source: ModelSource) -> TokenizerParts:
    """The tokenizer of --tokenizer; what ends a sequence, the model's own files know too."""
    assert source.tokenizer is not None
    try:
        parts = read_folder(source.tokenizer)
    except StartupError as error:
        raise StartupError(str(error).replace("--model", "--tokenizer", 1)) from None
    own = (
        gguf_end_ids(source.path) if source.is_gguf else generation_end_ids(source.path, vocabulary_size(parts.backend))
    )
    return replace(parts, eos_token_ids=tuple(dict.fromkeys([*own, *parts.eos_token_ids])))


def _is_blank(text: str) -> bool:
    """Whitespace that some vocabularies list as added tokens: ordinary text, no markup."""
    return not text.replace(SPACE, " ").strip()


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "The text is not valid Unicode: it holds a lone surrogate.", None, "invalid_value"
        ) from None
    if len(text) < LONG_TEXT:
        return list(backend.encode(text, add_special_tokens=False).ids)
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)  # `encode` would hold the lock throughout
    return list(encoding.ids)


def _longest_token(backend: tokenizers.Tokenizer) -> tuple[int, bytes] | None:
    """Bytes of text that one token stands for at most, and the bytes that have no token (a byte-level vocabulary may
    lack some; text loses them). None where a token may stand for any number of bytes.
    """
    data = json.loads(backend.to_str())
    added = backend.get_added_tokens_decoder().values()
    normalizers = _steps_of(data["normalizer"], "normalizers")
    pre_tokenizers = _steps_of(data["pre_tokenizer"], "pretokenizers")
    vocabulary = backend.get_vocab(with_added_tokens=False)
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    dropped = bytes(byte for char, byte in byte_level_alphabet().items() if is_byte_level and char not in vocabulary)
    has_bytes = is_byte_level and not (dropped and any(step["type"] == "NFC" for step in normalizers))
    if data["model"].get("byte_fallback"):
        has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    is_lossless = all(step["type"] in ("NFC", "ByteLevel", "Prepend") or _is_space_mark(step) for step in normalizers)
    keeps_all = all(_keeps_text(step) for step in pre_tokenizers)
    is_whole = data["truncation"] is None and data["model"]["type"] in ("BPE", "Unigram")
    if not (is_whole and has_bytes and is_lossless and keeps_all) or any(
        token.lstrip or token.rstrip for token in added
    ):
        return None
    lengths = [len(token) if is_byte_level else len(token.replace(SPACE, " ").encode()) for token in vocabulary]
    longest = max([*lengths, *(len(token.content.encode()) for token in added)])
    return longest * (NFC_SHRINKS if any(step["type"] == "NFC" for step in normalizers) else 1), dropped


def _steps_of(part: Any, key: str) -> list[Any]:
    """The steps of a normalizer or pre-tokenizer, sequences laid flat."""
    if part is None:
        return []
    return [step for inner in part[key] for step in _steps_of(inner, key)] if part["type"] == "Sequence" else [part]


def _is_space_mark(step: Any) -> bool:
    return bool(step == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE})


def _keeps_text(step: Any) -> bool:
    """Pre-tokenizers that only cut."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")


def _plain_tokenizers(
    backend: tokenizers.Tokenizer, control: Collection[str]
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The same tokenizer without its control tokens: for the start of a text, and for pieces further inside it.

    They differ where SentencePiece's space goes before the first piece of a text only.
    """
    data = json.loads(backend.to_str())
    kept = [token for token in data["added_tokens"] if token["content"] not in control]
    data |= {"added_tokens": kept, "post_processor": None, "model": _plain_model(data["model"], kept, control)}
    inside = {**data, "pre_tokenizer": _no_prefix(data["pre_tokenizer"])}
    plain = tokenizers.Tokenizer.from_str(json.dumps(data))
    if inside == data:
        return plain, plain
    return plain, tokenizers.Tokenizer.from_str(json.dumps(inside))


def _plain_model(model: dict[str, Any], kept: list[dict[str, Any]], control: Collection[str]) -> dict[str, Any]:
    """Control tokens out of reach: neither in the vocabulary nor made by a merge. Other ids stay what they are."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: ids are positions, so the piece stays, at a price nothing would pay
        worst = min((score for _, score in vocabulary), default=0.0) - 1e5
        return {**model, "vocab": [[piece, worst if piece in control else score] for piece, score in vocabulary]}
    unknown = model.get("unk_token")
    words = {token: index for token, index in vocabulary.items() if token not in control or token == unknown}
    words |= {token["content"]: token["id"] for token in kept}
    plain = {**model, "vocab": words}
    if "merges" in model:
        plain["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if left not in control and right not in control and left + right not in control
        ]
    return plain


def _no_prefix(pre_tokenizer: Any) -> Any:
    """Metaspace that marks the first piece only: not inside a text."""
    if isinstance(pre_tokenizer, list):
        return [_no_prefix(step) for step in pre_tokenizer]
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    if pre_tokenizer.get("prepend_scheme") == "first":
        return {**pre_tokenizer, "prepend_scheme": "never"}
    return {key: _no_prefix(value) for key, value in pre_tokenizer.items()}
