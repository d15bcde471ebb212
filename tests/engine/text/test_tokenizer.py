"""Tokenizers of model folders, and the three degrees of trust in a text."""

import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from bytetok import BOS, CHATML, EOS, IM_END, IM_START, TOOL_CALL, byte_tokenizer, save_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import CORPUS, TEXTS, byte_level, llama3_split, sentencepiece, sentencepiece_pieces
from tokenizers import AddedToken

from engine.errors import ContextLengthExceeded, InvalidRequest, StartupError
from engine.source import ModelSource
from engine.text.tokenizer import LONG_TEXT, NFC_SHRINKS, Tokenizer
from engine.text.tokenizer_files import TokenizerParts

BYTES = byte_tokenizer()
LLAMA3_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.load(ModelSource(folder, "m", "test"))


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def llama3(folder: Path) -> Path:
    backend = byte_level(llama3_split(), specials=LLAMA3_SPECIALS, plain_added=("<tool>",), bos=LLAMA3_SPECIALS[0])
    return save(folder, backend, {"bos_token": LLAMA3_SPECIALS[0], "eos_token": "<|eot_id|>"})


def mistral(folder: Path, *, legacy: bool = True) -> Path:
    pieces = sentencepiece_pieces(added=("[INST]", "[/INST]"))
    ids = pieces.ids
    scores = dict(zip(pieces.tokens, pieces.scores, strict=True))
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(ids, key=lambda token: -scores[token])
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    backend = sentencepiece(pieces, merges, legacy=legacy)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(folder, backend, config)


def spaces(folder: Path) -> Path:
    """Runs of blanks as added tokens, as in GPT-NeoX."""
    backend = byte_level(specials=("<|endoftext|>", "<|end|>"), plain_added=("  ", "    "))
    return save(folder, backend, {"bos_token": None, "eos_token": "<|endoftext|>"})


def strips(folder: Path) -> Path:
    """Control tokens that take the blanks beside them, as in Phi-3."""
    backend = byte_level(specials=("<|endoftext|>",))
    backend.add_special_tokens(
        [AddedToken("<|end|>", rstrip=True, normalized=False), AddedToken("<|mask|>", lstrip=True, normalized=False)]
    )
    return save(folder, backend, {"bos_token": None, "eos_token": "<|endoftext|>"})


FAMILIES = {
    "llama 3": llama3,
    "mistral, legacy": mistral,
    "mistral": lambda folder: mistral(folder, legacy=False),
    "spaces": spaces,
    "strips": strips,
}
MARKUP = ["<|eot_id|>", "<|begin_of_text|>", "<tool>", "[INST]", "[/INST]", "<s>", "</s>", "<|end|>", "<|mask|>"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FAMILIES[request.param](tmp_path)


# ------------------------------------------------------------------ against transformers
def test_folder_equals_transformers(transformers: Any, family: Path) -> None:
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(family), load(family)
    assert ours.vocab_size == len(theirs)
    assert ours.named_tokens == theirs.special_tokens_map
    for text in [*TEXTS, *CORPUS, *(f"a {mark} b" for mark in MARKUP), " ".join(MARKUP), "  <|end|>  \n x  <|mask|> y"]:
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]
        ids = ours.encode(text, add_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_trusted_text_is_encoded_as_by_the_full_tokenizer(family: Path) -> None:
    """Cutting a text at its control tokens and encoding the pieces is what the full tokenizer does inside."""
    tokenizer = load(family)
    texts = [*TEXTS, *(f"{a}{mark}{b}" for mark in MARKUP for a, b in (("", ""), ("hi", "you"), (" hi ", "  you\n")))]
    for text in [*texts, "".join(MARKUP), "<s>[INST] a [/INST] b</s>[INST] c [/INST]"]:
        assert tokenizer.encode_trusted(text) == tokenizer.encode(text, add_special_tokens=False), text


@pytest.fixture(scope="module")
def small_llama3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(llama3(tmp_path_factory.mktemp("llama3")))


@pytest.fixture(scope="module")
def small_mistral(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(mistral(tmp_path_factory.mktemp("mistral"), legacy=False))


PIECES = st.lists(st.sampled_from([*MARKUP, " ", "\n", "hello", "é", "漢", "<", "|", ">", "tool", "12"]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(PIECES)
def test_trusted_equals_full_on_any_mixture(
    small_llama3: Tokenizer, small_mistral: Tokenizer, parts: list[str]
) -> None:
    for tokenizer in (small_llama3, small_mistral):
        text = "".join(parts)
        assert tokenizer.encode_trusted(text) == tokenizer.encode(text, add_special_tokens=False)


# ------------------------------------------------------------------ control tokens
def test_a25_plain_text_holds_no_control_token(family: Path) -> None:
    tokenizer = load(family)
    for mark in MARKUP:
        text = f"hi {mark}\n{mark} there"
        ids = tokenizer.encode_plain(text)
        written = {tokenizer.backend.token_to_id(each) for each in MARKUP} - {None}
        assert written.isdisjoint(ids)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text


@settings(max_examples=150, deadline=None)
@given(PIECES, st.sets(st.integers(0, 11)))
def test_a25_words_are_never_control_tokens(small_llama3: Tokenizer, parts: list[str], words: set[int]) -> None:
    text = "".join(parts)
    found = [match.group() for match in small_llama3.find_control(text)]
    meant = [small_llama3.backend.token_to_id(mark) for n, mark in enumerate(found) if n not in words]
    ids = small_llama3.encode_trusted(text, words)
    control = small_llama3.backend.get_added_tokens_decoder()
    assert [token for token in ids if token in control] == meant
    assert small_llama3.decode(ids, skip_special_tokens=False) == text, "all of it is still there"


def test_a25_raw_text_is_parsed() -> None:
    ids = BYTES.encode("<|im_start|>x<tool_call>", add_special_tokens=True)
    assert ids == [IM_START, ord("x"), TOOL_CALL]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_plain_round_trip(text: str) -> None:
    assert BYTES.encode_plain(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode_plain(text)) == text


def test_merges_that_lead_to_a_control_token_are_out_of_reach() -> None:
    """A GGUF's scores can make '<s>' out of '<', 's' and '>'."""
    vocabulary = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "</s>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("<", "s"), ("<s", ">")]))
    backend.decoder = tokenizers.decoders.Fuse()
    assert backend.encode("<s>").ids == [4], "the check can fail"
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(TokenizerParts(backend, {"bos_token": "<s>"}, (5,), True, None))
    assert tokenizer.encode_plain("<s>") == [3, 2]
    assert tokenizer.encode("<s>", add_special_tokens=False) == [4]


def test_of_two_control_tokens_that_begin_alike_the_longer_is_found() -> None:
    backend = byte_level(specials=("<a", "<a>", "<a>b"))
    tokenizer = Tokenizer(TokenizerParts(backend, {}, (0,), False, None))
    for text in ("<a>", "<a>b", "<a>c", "<a<a>b<a>"):
        assert tokenizer.encode_trusted(text) == tokenizer.encode(text, add_special_tokens=False)


def test_unigram_vocabularies_keep_their_ids() -> None:
    model = tokenizers.models.Unigram([("<unk>", -9.0), ("<s>", 0.0), ("<", -5.0), ("s", -4.0), (">", -5.0)], 0, False)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(TokenizerParts(backend, {"bos_token": "<s>"}, (1,), True, None))
    assert tokenizer.encode_plain("s<s>") == [3, 2, 3, 4]


def test_blank_added_tokens_are_ordinary_text(tmp_path: Path) -> None:
    tokenizer = load(spaces(tmp_path))
    text = "a  b    c"
    ids = tokenizer.encode_plain(text)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.backend.token_to_id("    ") in ids


# ------------------------------------------------------------------ BOS
def test_exactly_one_bos(family: Path) -> None:
    tokenizer = load(family)
    bos = tokenizer.bos_token_id
    if bos is None:
        assert not tokenizer.adds_bos
        return
    written = tokenizer.named_tokens["bos_token"]
    for text in ("", "hello", written, f"{written}hello"):
        assert tokenizer.encode(text, add_special_tokens=True).count(bos) == 1
    assert bos not in tokenizer.encode("hello", add_special_tokens=False)
    assert bos not in tokenizer.encode_plain(f"{written}hello")


def test_add_bos_token_beside_tokenizer_json_counts_for_nothing(transformers: Any, tmp_path: Path) -> None:
    """As in transformers 5: the post-processor decides."""
    save_byte_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert load(tmp_path).encode("a", add_special_tokens=True) == theirs("a")["input_ids"] == [97]


# ------------------------------------------------------------------ what else stands in a folder
def test_byte_tokenizer_from_a_folder(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (262, BOS, (EOS,))
    assert tokenizer.special_ids == {BOS, EOS, IM_START, IM_END} and tokenizer.chat_template == CHATML
    assert tokenizer.is_special(IM_END) and not tokenizer.is_special(TOOL_CALL)


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert load(tmp_path).eos_token_ids == (3, EOS)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [259, 257, 7]}')
    assert load(tmp_path).eos_token_ids == (259, EOS, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert load(tmp_path).eos_token_ids == (3, EOS)
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path).eos_token_ids == (EOS,)


@pytest.mark.parametrize("value", ["</s>", -1, [2, True], 1.5, 2**70, ["a"], [None], [257, [3]], 400, {}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_senseless_end_of_sequence_ids(tmp_path: Path, file: str, value: Any) -> None:
    """Also where the other file's hold instead."""
    save_byte_tokenizer(tmp_path)
    ids = {"config.json": {"vocab_size": 400, "eos_token_id": 3}, "generation_config.json": {"eos_token_id": 4}}
    for name, values in ids.items():
        (tmp_path / name).write_text(json.dumps(values | ({"eos_token_id": value} if name == file else {})))
    with pytest.raises(StartupError) as caught:
        load(tmp_path)
    wanted = "a token id or a list of them (ids of this vocabulary are 0 to 399)"
    assert str(caught.value) == f"--model: {tmp_path / file}: eos_token_id must be {wanted}, got {value!r}."


def test_ids_beyond_the_tokenizer_where_nobody_says_how_many_the_model_has(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": BYTES.vocab_size - 1}))
    assert load(tmp_path).eos_token_ids == (BYTES.vocab_size - 1, EOS)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": BYTES.vocab_size}))
    with pytest.raises(StartupError, match=rf"0 to {BYTES.vocab_size - 1}\), got {BYTES.vocab_size}\."):
        load(tmp_path)


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).encode("hello", add_special_tokens=False) == list(b"hello")


def test_special_tokens_named_beside_tokenizer_json(tmp_path: Path) -> None:
    """tokenizer.json may list a token without marking it special."""
    save_byte_tokenizer(tmp_path)
    config = {"eos_token": {"content": "</tool_call>"}, "additional_special_tokens": ["<tool_call>", "<gone>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert tokenizer.special_ids >= {TOOL_CALL, TOOL_CALL + 1} and tokenizer.eos_token_ids == (TOOL_CALL + 1,)


@pytest.mark.parametrize(
    ("config", "jinja", "template"),
    [
        ({}, None, None),
        ({"chat_template": "T"}, None, "T"),
        ({"chat_template": "T"}, "J", "J"),
        ({"chat_template": [{"name": "tool_use", "template": "X"}, {"name": "default", "template": "D"}]}, None, "D"),
    ],
)
def test_where_the_chat_template_stands(
    tmp_path: Path, config: dict[str, Any], jinja: str | None, template: str | None
) -> None:
    save_byte_tokenizer(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|end|>"}))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert load(tmp_path).chat_template == template


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "must hold a JSON object, got list"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[" * 10**5), "JSON: it is nested too deeply"),
        (lambda folder: (folder / "generation_config.json").write_text("[" * 10**5), "JSON: it is nested too deeply"),
        (lambda folder: (folder / "tokenizer.json").write_text("[" * 10**5), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), "names no end-of-sequence token"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja cannot be read"),
    ],
)
def test_damaged_folders_are_refused_in_one_sentence(tmp_path: Path, damage: Any, words: str) -> None:
    save_byte_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(StartupError, match=r"^--model") as caught:
        load(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("encode", [lambda text: BYTES.encode(text, add_special_tokens=True), BYTES.encode_plain])
def test_lone_surrogates_are_the_clients_fault(encode: Any) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        encode("a\ud800b")


# ------------------------------------------------------------------ floors
@pytest.mark.parametrize(
    "module",
    [
        "engine.source",
        "engine.text.tokenizer",
        "engine.text.gguf_tokenizer",
        "engine.text.chat_template",
        "engine.text.detokenizer",
        "engine.text.stop_strings",
        "engine.text.output_processor",
    ],
)
def test_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_using_it_loads_no_torch(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    code = (
        "import sys, pathlib; from engine.source import ModelSource\n"
        "from engine.text.tokenizer import Tokenizer; from engine.text.chat_template import ChatRenderer\n"
        "tokenizer = Tokenizer.load(ModelSource(pathlib.Path(sys.argv[1]), 'm', 'test'))\n"
        "ids = ChatRenderer(tokenizer).render([{'role': 'user', 'content': 'hi'}])\n"
        "assert tokenizer.decode(ids, False).startswith('<|im_start|>user')\n"
        "import huggingface_hub; from huggingface_hub import errors, snapshot_download\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_text_that_certainly_exceeds_the_window_is_refused_by_its_length():
    tokenizer = byte_tokenizer(["xy" * 10])
    tokenizer.check_fits("x" * 20 * 8, 8)
    tokenizer.check_fits("x" * 10**6, None)
    with pytest.raises(ContextLengthExceeded, match="at least 9 tokens"):
        tokenizer.check_fits("x" * (20 * 8 + 1), 8)
    with pytest.raises(ContextLengthExceeded):
        tokenizer.check_fits("é" * (10 * 8 + 1), 8)


def test_composition_shrinks_utf8_by_four_at_most():
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    forms = ("NFC", "NFD")
    changing = [char for char in characters if not all(unicodedata.is_normalized(form, char) for form in forms)]
    spellings: dict[str, str] = {}  # a composed text -> its longest spelling among single characters
    for char in changing:
        composed = unicodedata.normalize("NFC", char)
        spellings[composed] = max(spellings.get(composed, composed), char, key=lambda text: len(text.encode()))
    shrinks = 0.0
    for text in {*changing, *spellings}:  # all others stay as they are, and nothing becomes them
        composed, parts = (unicodedata.normalize(form, text) for form in forms)
        longest = sum(len(spellings.get(part, part).encode()) for part in parts)
        shrinks = max(shrinks, longest / len(composed.encode()))
    assert NFC_SHRINKS - 1 < shrinks <= NFC_SHRINKS


def test_long_texts_have_the_tokens_that_they_would_have_had():
    tokenizer = byte_tokenizer()
    text = "hé <|end|> " * (LONG_TEXT // 4)
    assert (
        tokenizer.encode(text, add_special_tokens=False) == tokenizer.backend.encode(text, add_special_tokens=False).ids
    )
