"""A tokenizer rebuilt from a GGUF file's metadata.

A GGUF holds the vocabulary, the merges (or scores) and the *name* of the pre-tokenizer; what the name means, its
reader must know. Two kinds are read: `gpt2` (byte-level BPE) and `llama` (SentencePiece BPE with byte fallback).
Reference: transformers' conversion of the same files, and llama.cpp's `llama-vocab.cpp` for the pre-tokenizers' names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from configs.gguf_file import GGUFFile
from configs.model_fields import MAX_SIZE, Fields
from engine.errors import StartupError, reason_of
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
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary wants text cut before it merges."""

    split: str | None = None
    """Regular expression of the pieces; None: GPT-2's."""
    digits: bool = False
    """Digits one by one, before anything else."""
    composed: bool = False
    """Unicode NFC first."""
    whole_words: bool = False
    """A piece that is in the vocabulary is taken as it stands, though no merge may lead to it (tiktoken does so)."""
    adds_bos: bool = False
    """What a file without `add_bos_token` means."""


LLAMA3 = PreTokenizer(LLAMA3_SPLIT, whole_words=True, adds_bos=True)
QWEN2 = PreTokenizer(QWEN2_SPLIT, composed=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": PreTokenizer(TEKKEN_SPLIT, whole_words=True, adds_bos=True),
    "dbrx": PreTokenizer(LLAMA3_SPLIT),
    "gpt-4o": PreTokenizer(GPT4O_SPLIT),
}
"""By `tokenizer.ggml.pre`. Phi-4's files say dbrx, Phi-4-mini's gpt-4o, Mistral Nemo's tekken."""

ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
END_IDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def read_gguf(path: Path) -> TokenizerParts:
    """Raises `StartupError` for a kind or a pre-tokenizer that is not known, or metadata that makes no sense."""
    metadata = _metadata(path)
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
        raise StartupError(f"--model {path}: the tokenizer in it cannot be read: {reason_of(error)}.") from None


def gguf_end_ids(path: Path) -> tuple[int, ...]:
    """Ids that end a sequence, whatever else there is to say of the tokenizer."""
    return _end_ids(_metadata(path))


def _metadata(path: Path) -> Mapping[str, Any]:
    """Raises `StartupError` for the id of a token that the file does not have."""
    metadata = GGUFFile.read(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    last = len(tokens) - 1 if isinstance(tokens, list) else MAX_SIZE
    fields = Fields(str(path), metadata)
    for key in metadata:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            fields.integer(key, low=0, high=last)
    return metadata


def _end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(metadata[key] for key in END_IDS if key in metadata))


def _parts(backend: Tokenizer, metadata: Mapping[str, Any], kind: str, pre: str) -> TokenizerParts:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {role: tokens[metadata[key]] for role, key in ROLES.items() if key in metadata}
    # A file without the flag means what its kind of vocabulary has always meant.
    adds_bos = kind == "llama" or PRE_TOKENIZERS[pre].adds_bos
    return TokenizerParts(
        backend,
        named,
        _end_ids(metadata),
        "bos_token" in named and bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        metadata.get("tokenizer.chat_template"),
    )


def _byte_level(metadata: Mapping[str, Any], pre: PreTokenizer) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole_words))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None)]
    if pre.split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    if pre.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    family, tokens = metadata.get("general.architecture"), metadata["tokenizer.ggml.tokens"]
    if family == "gemma3":  # its runs of spaces are written as such
        tokens = [token.replace(" ", SPACE) if not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    else:
        # Gemma was trained to merge in the order of its vocabulary, which its scores do not follow.
        in_order = [-float(index) for index in range(len(tokens))]
        merges = merges_from_scores(vocabulary, in_order if family == "gemma3" else metadata["tokenizer.ggml.scores"])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if family == "phi3" and prefix:  # a space more, also before text that begins with one or follows a control token
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
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
    # Phi-3's markup takes the whitespace after it along; the file does not say so.
    strips = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=strips and token not in PHI3_UNSTRIPPED)
            for token in control
        ]
    )
    known = [token for token in own if backend.token_to_id(token) is not None]  # Gemma's spaces are spelled otherwise
    backend.add_tokens([AddedToken(token, normalized=False, special=False, rstrip=strips) for token in known])
