"""What a tokenizer is made of, read from a model folder: tokenizer.json and the files beside it.

tokenizer.json is taken as it stands, as transformers' PreTrainedTokenizerFast does; transformers itself is not imported
(it brings torch in). So its post-processor decides about BOS, and `add_bos_token` in tokenizer_config.json does not.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

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
    config = _read_json(folder / "tokenizer_config.json")
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


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"--model {file.parent}: {file.name} cannot be read: {reason_of(error)}.") from None
    if not isinstance(value, dict):
        raise StartupError(f"--model {file.parent}: {file.name} does not hold a JSON object.")
    return value


def _token_text(value: Any) -> str | None:
    """A token stands in tokenizer_config.json as its text, or as an object with its text under 'content'."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special(named: dict[str, str], config: dict[str, Any], backend: tokenizers.Tokenizer) -> list[str]:
    """Tokens with a role that tokenizer.json does not mark as special, though the vocabulary has them."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    extra = [_token_text(value) for value in config.get("additional_special_tokens") or ()]
    wanted = dict.fromkeys([*named.values(), *(text for text in extra if text is not None)])
    return [text for text in wanted if text not in marked and backend.token_to_id(text) is not None]


def generation_end_ids(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise StartupError(
                    f"--model {folder}: eos_token_id in {name} must be a token id or a list of them, got {found!r}."
                )
            return ids
    return []


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """As the model's files say; the tokenizer's own EOS always counts."""
    own = backend.token_to_id(eos_token) if eos_token is not None else None
    return tuple(dict.fromkeys([*generation_end_ids(folder), *([] if own is None else [own])]))


def _post_processor_adds(backend: tokenizers.Tokenizer, bos: str) -> bool:
    return backend.token_to_id(bos) in backend.encode("", add_special_tokens=True).ids


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json: a template, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--model {folder}: {file.name} cannot be read: {reason_of(error)}.") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None
