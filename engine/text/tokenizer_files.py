"""What a tokenizer is made of, read from a model folder: tokenizer.json and the files beside it.

tokenizer.json is taken as it stands, as transformers' PreTrainedTokenizerFast does; transformers itself is not imported
(it brings torch in). So its post-processor decides about BOS, and `add_bos_token` in tokenizer_config.json does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from configs.model_fields import read_json
from engine.errors import StartupError, reason_of

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens with a role; chat templates see them under these names."""


@dataclass(frozen=True)
class TokenizerParts:
    backend: tokenizers.Tokenizer
    named_tokens: dict[str, str]
    """Text by role, a part of `NAMED_TOKENS`."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a sequence, the model's own first."""
    add_bos: bool
    """Whether raw text gets a BOS in front."""
    chat_template: str | None


def read_folder(folder: Path) -> TokenizerParts:
    """Raises `StartupError` where tokenizer.json is missing or a file cannot be read."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"--model {folder} has no tokenizer.json; other tokenizer files must be converted to it.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"--model {folder}: tokenizer.json cannot be read: {reason_of(error)}.") from None
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json", needed=False).values
    texts = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
    named = {name: text for name, text in texts.items() if text is not None}
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, special=True) for text in _special(named, config, backend)]
    )
    bos = named.get("bos_token")
    return TokenizerParts(
        backend,
        named,
        _eos_ids(folder, backend, named.get("eos_token")),
        bos is not None and _post_processor_adds(backend, bos),
        _chat_template(folder, config),
    )


def _token_text(value: Any) -> str | None:
    """A token stands in tokenizer_config.json as its text, or as an object with its text under 'content'."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special(named: dict[str, str], config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> list[str]:
    """Tokens with a role that tokenizer.json does not mark as special, though the vocabulary has them."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    others = config.get("additional_special_tokens")
    extra = map(_token_text, others) if isinstance(others, list) else ()
    wanted = dict.fromkeys([*named.values(), *(text for text in extra if text is not None)])
    return [text for text in wanted if text not in marked and backend.token_to_id(text) is not None]


def generation_end_ids(folder: Path, vocabulary: int) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, else of config.json. vocabulary: its size, where the latter does not
    say. Raises `StartupError` for ids that it does not have, in either file."""
    config, generation = (read_json(folder / name, needed=False) for name in ("config.json", "generation_config.json"))
    vocabulary = config.integer("vocab_size", default=vocabulary)
    own, better = (fields.token_ids("eos_token_id", vocabulary) for fields in (config, generation))
    return better or own


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """As the model's files say; the tokenizer's own EOS always counts."""
    own = backend.token_to_id(eos_token) if eos_token is not None else None
    stated = generation_end_ids(folder, vocabulary_size(backend))
    return tuple(dict.fromkeys([*stated, *([] if own is None else [own])]))


def vocabulary_size(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _post_processor_adds(backend: tokenizers.Tokenizer, bos: str) -> bool:
    return backend.token_to_id(bos) in backend.encode("", add_special_tokens=True).ids


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json: a template, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--model {folder}: {file.name} cannot be read: {reason_of(error)}.") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next((entry.get("template") for entry in entries), None)
    return template if isinstance(template, str) else None
