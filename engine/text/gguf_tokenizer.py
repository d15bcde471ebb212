"""A tokenizer rebuilt from a GGUF file's metadata.

A GGUF holds the vocabulary, the merges (or scores) and the *name* of the pre-tokenizer; what the name means, its
reader must know. Two kinds are read: `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE with byte fallback).
Reference: transformers' conversion of the same files, and llama.cpp's `llama-vocab.cpp` for the pre-tokenizers' names.
"""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from configs.gguf_file import GGUFFile
from engine.errors import StartupError
from engine.text.tokenizer_files import TokenizerParts

SPACE = "▁"
"""How SentencePiece spells a space."""

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
"""`tokenizer.ggml.pre` -> the splitting rule it means"""

ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
END_IDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def read_gguf(path: Path) -> TokenizerParts:
    """Raises `StartupError` for a kind or a pre-tokenizer that is not known, or metadata that makes no sense."""
    metadata = GGUFFile.read(path).metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    try:
        if kind == "gpt2":
            if pre not in PRE_TOKENIZERS:
                known = ", ".join(sorted(PRE_TOKENIZERS))
                raise StartupError(f"--model {path}: the pre-tokenizer '{pre}' is not supported; supported: {known}.")
            backend = _byte_level(metadata, PRE_TOKENIZERS[pre])
        elif kind == "llama":
            backend = _sentencepiece(metadata)
        else:
            raise StartupError(f"--model {path}: the tokenizer kind {kind!r} is not supported; supported: gpt2, llama.")
        _add_tokens(backend, metadata)
        return _parts(backend, metadata, kind, pre)
    except StartupError:
        raise
    except Exception as error:  # wrong types or indices in the file; the tokenizers library raises plain Exception
        raise StartupError(f"--model {path}: the tokenizer in it cannot be read: {error}.") from None


def _parts(backend: Tokenizer, metadata: Mapping[str, Any], kind: str, pre: str) -> TokenizerParts:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {role: tokens[metadata[key]] for role, key in ROLES.items() if key in metadata}
    ends = dict.fromkeys(metadata[key] for key in END_IDS if key in metadata)
    # A file without the flag means what its kind of vocabulary has always meant.
    adds_bos = kind == "llama" or PRE_TOKENIZERS.get(pre) == "llama-bpe"
    return TokenizerParts(
        backend,
        named,
        tuple(ends),
        "bos_token" in named and bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        metadata.get("tokenizer.chat_template"),
    )


def _byte_level(metadata: Mapping[str, Any], pre: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 was trained by tiktoken, which takes a whole word that is in the vocabulary as it stands.
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    after_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "gpt-2":
        backend.pre_tokenizer = by_gpt2
    elif pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_gpt2])
    else:
        pattern = LLAMA3_SPLIT if pre == "llama-bpe" else QWEN2_SPLIT
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, after_split])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        merges = merges_from_scores(vocabulary, metadata["tokenizer.ggml.scores"])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the piece of the highest score: as a list, best first."""
    pairs = [
        (-scores[index], -cut, cut - len(token), index, vocabulary[token[:cut]], token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(pairs)]


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens as special ones, user-defined tokens (`<think>`) as plain added ones: found whole in raw text."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    control = [t for t, kind in zip(tokens, types, strict=False) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    own = [token for token, kind in zip(tokens, types, strict=False) if kind == TokenType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
