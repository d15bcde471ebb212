"""Tokenizers rebuilt from GGUF metadata, against what transformers makes of the same metadata."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizer_families import CORPUS, TEXTS, Pieces, byte_level, llama3_split, sentencepiece, sentencepiece_pieces
from tokenizers import AddedToken, Regex, pre_tokenizers

from engine.errors import StartupError
from engine.source import ModelSource
from engine.text.gguf_tokenizer import (
    GPT4O_SPLIT,
    QWEN2_SPLIT,
    SPACE,
    TEKKEN_SPLIT,
    merges_from_scores,
    read_gguf,
)
from engine.text.tokenizer import Tokenizer

SPECIALS = ("<|begin|>", "<|end|>")
ADDED = ("<think>",)
ALL_TEXTS = [*TEXTS, *CORPUS[:6]]


def test_there_are_texts_enough() -> None:
    assert len(set(TEXTS)) >= 80


@pytest.mark.parametrize("text", ALL_TEXTS)
def test_smollm2_equals_transformers_with_digits(smollm2: Tokenizer, smollm2_reference: Any, text: str) -> None:
    assert smollm2.encode(text, add_special_tokens=True) == smollm2_reference(text)["input_ids"]


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.special_ids == frozenset(range(17)) and not smollm2.adds_bos
    assert smollm2.chat_template is not None
    assert smollm2.named_tokens["eos_token"] == "<|im_end|>"


def test_smollm2_takes_digits_one_by_one(smollm2: Tokenizer) -> None:
    assert [smollm2.token_text(token) for token in smollm2.encode_plain("in 1234")] == ["in", " ", "1", "2", "3", "4"]


# ------------------------------------------------------------------ files made here
def write_gguf(
    path: Path, kind: str, tokens: list[str], types: list[int], family: str = "llama", **fields: Any
) -> Path:
    writer = gguf.GGUFWriter(path, family)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(split: Any) -> tuple[list[str], list[int], list[str]]:
    """(tokens, token types, merges)"""
    backend = byte_level(split, specials=SPECIALS, plain_added=ADDED)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token in SPECIALS else 4 if token in ADDED else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return tokens, types, merges


def transformers_backend(transformers: Any, kind: str, pre: str, family: str = "llama", **fields: Any) -> Any:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    backend, _ = convert_gguf_tokenizer(
        family, {"tokenizer_type": kind, "pre_tokenizer_type": pre, "unk_token_id": 0, **fields}
    )
    return backend


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


QWEN2 = split_by(QWEN2_SPLIT)


@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("gpt-2", None),
        ("default", None),
        ("llama-bpe", llama3_split()),
        ("qwen2", QWEN2),
        ("tekken", split_by(TEKKEN_SPLIT)),
        ("dbrx", llama3_split()),
        ("gpt-4o", split_by(GPT4O_SPLIT)),
    ],
)
def test_byte_level_equals_transformers(transformers: Any, tmp_path: Path, pre: str, split: Any) -> None:
    tokens, types, merges = byte_level_fields(split)
    begin, end = tokens.index("<|begin|>"), tokens.index("<|end|>")
    path = write_gguf(
        tmp_path / "m.gguf", "gpt2", tokens, types, pre=pre, merges=merges, bos_token_id=begin, eos_token_id=end
    )
    tokenizer = Tokenizer.load(ModelSource(path, "m", "test"))
    theirs = transformers_backend(transformers, "gpt2", pre, tokens=tokens, token_type=types, merges=merges)
    for text in [*ALL_TEXTS, "a<|end|>b <think>c</think>", "<|begin|>x"]:
        if pre == "qwen2":
            text = unicodedata.normalize("NFC", text)
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.vocab_size == len(tokens)
    adds_bos = pre in ("llama-bpe", "tekken")
    assert tokenizer.adds_bos == adds_bos, "a file without the flag means what its kind always meant"
    assert tokenizer.special_ids == {begin, end}


def test_qwen2_normalizes_as_its_class_in_transformers(transformers: Any, tmp_path: Path) -> None:
    tokens, types, merges = byte_level_fields(QWEN2)
    path = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, pre="qwen2", merges=merges, eos_token_id=0)
    ours = read_gguf(path).backend
    theirs = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]
    )
    for text in ALL_TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_rules_are_told_apart(tmp_path: Path, pre: str) -> None:
    """Each rule cuts some text as no other does: from one vocabulary of words, the ids tell where the cuts were."""
    pieces = {
        "llama-bpe": ["123", "45", "It", "'s", "HelloWorld"],
        "qwen2": ["1", "2", "3", "4", "5", "It", "'s", "HelloWorld"],
        "tekken": ["1", "2", "3", "4", "5", "It", "'s", "Hello", "World"],
        "gpt-4o": ["123", "45", "It's", "Hello", "World"],
    }
    path = write_gguf(tmp_path / "m.gguf", "gpt2", ["a", "b", "ab"], [1] * 3, pre=pre, merges=["a b"])
    pre_tokenizer = read_gguf(path).backend.pre_tokenizer
    found = [piece for text in ("12345", "It's", "HelloWorld") for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces[pre]


@pytest.mark.parametrize("with_merges", [False, True])
def test_sentencepiece_equals_transformers(transformers: Any, tmp_path: Path, with_merges: bool) -> None:
    pieces = sentencepiece_pieces(added=("[INST]", "[/INST]"))
    theirs = transformers_backend(
        transformers, "llama", "default", tokens=pieces.tokens, token_type=pieces.types, scores=pieces.scores
    )
    tokenizer = load_sentencepiece(tmp_path, pieces, merges=merges_of(theirs) if with_merges else None)
    for text in [*ALL_TEXTS, "<s>[INST] hello [/INST] world</s>", "hello<s> again"]:
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == tokenizer.bos_token_id == 1
    assert tokenizer.special_ids == {0, 1, 2, 3, 4} and tokenizer.eos_token_ids == (2,)


def gemma_pieces() -> Pieces:
    """As Gemma's files have it: roles first, runs of newlines and of spaces (as spaces), unused tokens; merges in the
    order of the vocabulary, whatever the scores say; no space before the text."""
    base = sentencepiece_pieces()
    roles, control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], ["<unused0>", "<start_of_turn>", "<end_of_turn>"]
    runs = ["\n" * count for count in range(2, 6)] + [" " * count for count in range(2, 9)]
    plain = (token for token, kind in zip(base.tokens, base.types, strict=True) if kind == 1)
    words = [token for token in plain if set(token) != {SPACE}]
    own = [*runs, "<table>", "</table>"]
    tokens = [*roles, *control, *own, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *words]
    types = [3] * (len(roles) + len(control)) + [4] * len(own) + [6] * 256 + [1] * (1 + len(words))
    scores = [-1000.0] * (len(tokens) - len(words)) + [float(n) for n in range(len(words))]
    return Pieces(tokens, scores, types)


def test_gemma_equals_its_class_in_transformers(transformers: Any, tmp_path: Path) -> None:
    pieces = gemma_pieces()
    roles = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    path = write_gguf(
        tmp_path / "m.gguf", "llama", pieces.tokens, pieces.types, "gemma3", pre="default", scores=pieces.scores,
        add_space_prefix=False, add_bos_token=True, **roles,
    )  # fmt: skip
    tokenizer = Tokenizer.load(ModelSource(path, "m", "test"))
    theirs = transformers_backend(
        transformers, "llama", "default", "gemma3",
        tokens=pieces.tokens, token_type=pieces.types, scores=pieces.scores, unk_token_id=3,
    )  # fmt: skip
    chat = "<start_of_turn>user\nhello<end_of_turn>\n<table> a   b"
    for text in [*ALL_TEXTS, chat, "a  b        c          d\n\n\n\n\n\n\ne"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text.replace(SPACE, " ")
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == 2
    by_scores = load_sentencepiece(tmp_path, pieces, add_space_prefix=False)
    assert any(by_scores.encode_plain(text) != tokenizer.encode_plain(text) for text in ALL_TEXTS)


def test_phi3_equals_its_tokenizer_file(transformers: Any, tmp_path: Path) -> None:
    """A space before every piece between control tokens, which take the whitespace after them along."""
    pieces = sentencepiece_pieces(added=("<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"))
    tokenizer = load_sentencepiece(tmp_path, pieces, family="phi3")
    merges = merges_from_scores(pieces.ids, pieces.scores)
    theirs = sentencepiece(pieces, merges, legacy=True)
    theirs.add_special_tokens(
        [AddedToken(t, normalized=False, special=True, rstrip=True) for t in ("</s>", *pieces.tokens[4:7])]
    )
    chat = "<|user|>\nhello world<|end|>\n<|assistant|>\n  the answer<|endoftext|>\n x <s> y</s>  z"
    for text in [*ALL_TEXTS, chat]:
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    backend = transformers_backend(
        transformers, "llama", "default", "phi3", tokens=pieces.tokens, token_type=pieces.types, scores=pieces.scores
    )
    for text in ALL_TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


def test_merges_of_equal_score_are_ordered_as_in_transformers(transformers: Any) -> None:
    from transformers.tokenization_utils_base import generate_merges

    tokens = ["b", "a", "ab", "aba", "bab", "ba", "abab", "aab", "ababab"]
    scores = [0.0, 0.0, -1.0, -2.0, -2.0, -1.0, -3.0, -2.0, -3.0]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ours = merges_from_scores(vocabulary, scores)
    assert ours == generate_merges(vocabulary, dict(zip(tokens, scores, strict=True))) and len(ours) > 10


def test_llama3_takes_a_whole_word_of_its_vocabulary(tmp_path: Path) -> None:
    """tiktoken looks a word up before it merges: also one that no merge leads to."""
    tokens = ["h", "i", "hi", "hh"]
    for pre, ids in (("llama-bpe", [2]), ("gpt-2", [0, 1])):
        path = write_gguf(tmp_path / f"{pre}.gguf", "gpt2", tokens, [1] * 4, pre=pre, merges=["h h"])
        assert read_gguf(path).backend.encode("hi").ids == ids


def merges_of(backend: Any) -> list[str]:
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def load_sentencepiece(
    folder: Path, pieces: Pieces, merges: list[str] | None = None, family: str = "llama", **fields: Any
) -> Tokenizer:
    extra: dict[str, Any] = {"scores": pieces.scores} if merges is None else {"merges": merges}
    path = write_gguf(
        folder / "m.gguf",
        "llama",
        pieces.tokens,
        pieces.types,
        family,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **extra,
        **fields,
    )
    return Tokenizer.load(ModelSource(path, "m", "test"))


def test_sentencepiece_round_trip(tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(tmp_path, sentencepiece_pieces())
    for text in ALL_TEXTS:
        if "▁" not in text and not text.startswith(" "):  # Metaspace takes one for the space it would put there
            assert tokenizer.decode(tokenizer.encode_plain(text)) == text


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(tmp_path, sentencepiece_pieces(), add_space_prefix=False)
    for text in ("hello", " hello"):
        ids = tokenizer.encode_plain(text)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text == tokenizer.decode(ids)


def test_several_ends(tmp_path: Path) -> None:
    tokenizer = load_sentencepiece(
        tmp_path, sentencepiece_pieces(added=("<eot>",)), eot_token_id=3, add_bos_token=False
    )
    assert tokenizer.eos_token_ids == (2, 3)
    assert tokenizer.encode("a", add_special_tokens=True)[0] != 1


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (
            "gpt2",
            {"pre": "mystery", "merges": []},
            "the pre-tokenizer 'mystery' is not supported; supported: dbrx, deepseek-r1-qwen, default,",
        ),
        ("rwkv", {}, "the tokenizer kind 'rwkv' is not supported; supported: gpt2, llama"),
        ("gpt2", {"pre": "gpt-2", "eos_token_id": 0}, "the tokenizer in it cannot be read: 'tokenizer.ggml.merges'"),
        ("gpt2", {"pre": "gpt-2", "merges": ["x y"]}, "cannot be read"),
        ("llama", {"scores": [0.0]}, "cannot be read"),
        ("llama", {"eos_token_id": 99}, "m.gguf: tokenizer.ggml.eos_token_id must be at most 2, got 99."),
        ("llama", {"unknown_token_id": 3}, "m.gguf: tokenizer.ggml.unknown_token_id must be at most 2, got 3."),
        ("gpt2", {"eot_token_id": 2**32 - 1}, "tokenizer.ggml.eot_token_id must be at most 2, got 4294967295."),
        ("gpt2", {"fim_pre_token_id": [1]}, "fim_pre_token_id must be an integer of at least 0, got [1]."),
        ("gpt2", {"pre": "gpt-2", "merges": ["a b"]}, "names no end-of-sequence token"),
    ],
)
def test_unreadable_files_are_refused_in_one_sentence(
    tmp_path: Path, kind: str, fields: dict[str, Any], words: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind, ["a", "b", "ab"], [1, 1, 1], **fields)
    with pytest.raises(StartupError, match=r"^--model") as caught:
        Tokenizer.load(ModelSource(path, "m", "test"))
    assert words in str(caught.value) and "\n" not in str(caught.value)
