import codecs

import pytest
from bytetok import EOS, IM_END, byte_backend, byte_spelling, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from engine.text.detokenizer import MAX_HELD_TOKENS, LibraryDetokenizer
from engine.text.token_bytes import TokenBytes
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerParts

BYTES = byte_tokenizer()
SPELLING = byte_spelling()


def pieces(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*map(stream.push, ids), stream.flush()]


def test_a02_characters_split_over_tokens() -> None:
    text = "👍é漢 ok"
    deltas = pieces(BYTES, list(text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[:4] == ["", "", "", "👍"], "a character comes as soon as its last byte is there"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a02_cut_inside_a_character(cut: int) -> None:
    deltas = pieces(BYTES, list("👍".encode()[:cut]))
    assert deltas == [""] * cut + ["\ufffd"]
    assert BYTES.decode(list("👍".encode()[:cut])) == "\ufffd"


def test_a02_invalid_byte_does_not_stall() -> None:
    deltas = pieces(BYTES, list(b"a\xffb"))
    assert deltas == ["a", "\ufffd", "b", ""]


def test_endless_broken_bytes_come_out_as_they_are_made() -> None:
    stream = BYTES.stream()
    texts = [stream.push(byte) for byte in b"\xf0\x9f" * 5000]
    behind = 10_000 // 2 - sum(map(len, texts))
    assert behind <= 1


def test_a_real_replacement_character_is_text() -> None:
    assert pieces(BYTES, list("\ufffdx".encode())) == ["", "", "\ufffd", "x", ""]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [72, IM_END, 105, EOS]
    assert BYTES.decode(ids) == "Hi"
    assert BYTES.decode(ids, skip_special_tokens=False) == "H<|im_end|>i<|end|>"
    assert BYTES.decode(BYTES.encode("<tool_call>", add_special_tokens=False)) == "<tool_call>", "added, not special"


def test_a_skipped_token_inside_a_character() -> None:
    first, *rest = "é".encode()
    assert BYTES.decode([first, IM_END, *rest]) == "é"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert BYTES.decode([72, 5000, -1, 2**40, 105]) == "Hi"
    assert BYTES.token_bytes(5000) == b"" and BYTES.token_text(5000) == ""


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_stream_is_the_whole_decoded_at_once(data: bytes) -> None:
    """Against Python's decoder and, for what ends between characters, against the tokenizers library."""
    text = "".join(pieces(BYTES, list(data)))
    assert text == data.decode("utf-8", "replace") == BYTES.decode(list(data))
    assert text == BYTES.backend.decode(list(data))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_equals_decode_stream_on_valid_text(text: str) -> None:
    ids = BYTES.encode_plain(text)
    library, ours = DecodeStream(skip_special_tokens=True), BYTES.stream()
    for token in ids:
        theirs = library.step(BYTES.backend, token) or ""
        mine = ours.push(token)
        if "\ufffd" not in text:
            assert mine == theirs


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.booleans())
def test_smollm2_round_trip(smollm2: Tokenizer, text: str, skip: bool) -> None:
    ids = smollm2.encode_plain(text)
    assert smollm2.decode(ids, skip) == smollm2.backend.decode(ids)
    if all(smollm2.backend.token_to_id(char) for char in map(SPELLING.__getitem__, text.encode())):
        # Its vocabulary lacks a few bytes, and what they spell is lost in any tokenizer made of it.
        assert smollm2.decode(ids, skip) == text
        assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_every_smollm2_token_alone_is_as_the_library_decodes_it(smollm2: Tokenizer) -> None:
    for token in range(smollm2.vocab_size):
        assert smollm2.token_text(token) == smollm2.backend.decode([token], skip_special_tokens=False)


# ------------------------------------------------------------------ SentencePiece spelling
SPM_VOCABULARY = ["<unk>", "<s>", "</s>", "▁Hello", "▁world", "lo", "▁", "▁▁", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"]
FAMILIES = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "pattern": decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "byte fallback, metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    backend = Backend(models.BPE(vocab={token: n for n, token in enumerate(SPM_VOCABULARY)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(TokenizerParts(backend, {"bos_token": "<s>"}, (2,), True, None))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11]), max_size=8))
def test_sentencepiece_decoders_equal_the_library(family: str, skip: bool, ids: list[int]) -> None:
    tokenizer = sentencepiece(FAMILIES[family])
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.backend.decode(
        ids, skip_special_tokens=skip
    )


def test_what_is_no_concatenation_is_known() -> None:
    two_spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    for decoder, known in ((two_spaces, False), (FAMILIES["pattern"], False), (FAMILIES["llama"], True)):
        assert isinstance(sentencepiece(decoder).stream(), LibraryDetokenizer) is not known


def test_sentencepiece_bytes_make_characters() -> None:
    tokenizer = sentencepiece(FAMILIES["llama"])
    assert pieces(tokenizer, [3, 8, 9, 10, 4]) == ["Hello", "", "", "€", " world", ""]
    assert pieces(tokenizer, [3, 8, 9]) == ["Hello", "", "", "\ufffd"], "one, not one a byte"
    assert tokenizer.token_bytes(8) == b"\xe2" and tokenizer.token_text(3) == " Hello"


def test_sentencepiece_keeps_the_space_after_a_prompt() -> None:
    """'Once upon' goes on with ' world'; the first word of a chat answer has no space before it."""
    tokenizer = sentencepiece(FAMILIES["llama"])
    assert tokenizer.stream(after=[1, 3]).push(4) == " world"
    assert tokenizer.stream(after=[1, 3, 1]).push(4) == "world"


# ------------------------------------------------------------------ decoders of other kinds
@pytest.fixture
def wordpiece() -> Backend:
    backend = Backend(models.WordLevel({"play": 0, "##ing": 1, "is": 2, "[UNK]": 3, "fun": 4}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


def test_other_decoders_go_through_the_library(wordpiece: Backend) -> None:
    tokenizer = Tokenizer(TokenizerParts(wordpiece, {}, (3,), False, None))
    assert isinstance(tokenizer.stream(), LibraryDetokenizer)
    assert not TokenBytes(wordpiece).concatenates
    assert pieces(tokenizer, [0, 1, 2, 4]) == ["play", "ing", " is", " fun", ""]
    assert tokenizer.decode([0, 1, 3, 2]) == "playing [UNK] is"
    assert tokenizer.token_bytes(0) == b"play"


def test_library_stream_does_not_stall_on_broken_bytes() -> None:
    """DecodeStream alone would hold these for ever."""
    backend = byte_backend()
    stream = LibraryDetokenizer(backend, frozenset())
    texts = [stream.push(0xFF) for _ in range(100)]
    assert len("".join(texts)) >= 100 - MAX_HELD_TOKENS
    stream = LibraryDetokenizer(backend, frozenset([EOS]))
    ids = [*"é漢".encode(), EOS, *b"a\xffb", 0xF0]
    assert "".join([*map(stream.push, ids), stream.flush()]) == "é漢a\ufffdb\ufffd"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=12))
def test_library_stream_is_the_whole(ids: list[int]) -> None:
    backend = Backend(models.WordLevel({"play": 0, "##ing": 1, "is": 2, "[UNK]": 3, "fun": 4}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    stream = LibraryDetokenizer(backend, frozenset())
    assert "".join([*map(stream.push, ids), stream.flush()]).strip() == backend.decode(ids).strip()


def test_python_and_rust_agree_on_ill_formed_text() -> None:
    """The premise of it all: one U+FFFD for each maximal ill-formed part, in both."""
    for data in (b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xe2\x82", b"\xf0\x9f\x91\x41"):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ours = "".join(decoder.decode(bytes([byte])) for byte in data) + decoder.decode(b"", final=True)
        assert ours == BYTES.backend.decode(list(data))
