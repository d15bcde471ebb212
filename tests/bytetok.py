"""The test kit's byte tokenizer: ids 0-255 are bytes, then control tokens, then whole words that only a script can say.

Every character that is not ASCII and every stop string so spans several tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerParts

BOS, EOS, IM_START, IM_END, TOOL_CALL, END_TOOL_CALL = range(256, 262)
CONTROL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
FIRST_WORD = 262
"""Id of the first of `words`."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    words: Sequence[str] = (),
    *,
    template: str | None = CHATML,
    add_bos: bool = False,
    eos: Sequence[int] = (EOS, IM_END),
) -> Tokenizer:
    """`<tool_call>` and its end are added tokens that are not special, as in Qwen's vocabularies."""
    named = {"bos_token": CONTROL[0], "eos_token": CONTROL[1]}
    return Tokenizer(TokenizerParts(byte_backend(words), named, tuple(eos), add_bos, template))


def byte_backend(words: Sequence[str] = ()) -> tokenizers.Tokenizer:
    spelling = byte_spelling()
    vocabulary = {spelling[byte]: byte for byte in range(256)}
    vocabulary |= {text: 256 + n for n, text in enumerate(CONTROL)}
    vocabulary |= {"".join(spelling[b] for b in word.encode()): FIRST_WORD + n for n, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL[:4]])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in CONTROL[4:]])
    return backend


def save_byte_tokenizer(folder: Path, *, template: str | None = CHATML) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as a model folder has them."""
    byte_backend().save(str(folder / "tokenizer.json"))
    config = {"bos_token": CONTROL[0], "eos_token": CONTROL[1]}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def byte_spelling() -> list[str]:
    """byte -> the character that byte-level vocabularies write for it."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(0x100, 0x200))
    return [chr(byte) if chr(byte) in alphabet else chr(next(others)) for byte in range(256)]
