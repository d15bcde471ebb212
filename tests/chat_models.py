"""Chats in few letters, and models to render them for: a tokenizer and the template made for it. For tests."""

import warnings
from typing import Any

import chat_templates as templates
from bytetok import CHATML, CONTROL, byte_tokenizer
from tokenizer_families import byte_level, llama3_split, sentencepiece, sentencepiece_pieces

from engine.text.chat_template import ChatRenderer
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import TokenizerParts


# ------------------------------------------------------------------ messages
def S(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def D(content: Any) -> dict[str, Any]:
    return {"role": "developer", "content": content}


def U(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def A(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def T(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "content": content}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


# ------------------------------------------------------------------ models
HEADERS = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def make(family: str) -> Tokenizer:
    if family == "chatml":
        return byte_tokenizer()
    if family == "llama 3":
        backend = byte_level(llama3_split(), specials=HEADERS, bos=HEADERS[0])
        named = {"bos_token": HEADERS[0], "eos_token": "<|eot_id|>"}
        return Tokenizer(TokenizerParts(backend, named, (backend.token_to_id("<|eot_id|>"),), True, templates.LLAMA3))
    if family == "thinking":
        backend = byte_level(llama3_split(), specials=CONTROL[:4], plain_added=THINK)
        named = {"bos_token": CONTROL[0], "eos_token": "<|im_end|>"}
        return Tokenizer(TokenizerParts(backend, named, (1,), False, templates.THINKING))
    pieces = sentencepiece_pieces(added=("[INST]", "[/INST]"))
    ids = pieces.ids
    merges = [(t[:1], t[1:]) for t in pieces.tokens if len(t) == 2 and t[:1] in ids and t[1:] in ids]
    backend = sentencepiece(pieces, merges, legacy=family == "mistral, legacy")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(TokenizerParts(backend, named, (2,), True, templates.MISTRAL))


FAMILIES = ["chatml", "llama 3", "thinking", "mistral", "mistral, legacy"]
MODELS = {family: make(family) for family in FAMILIES}


# ------------------------------------------------------------------ rendering
def renderer(template: str | None = CHATML) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(), template)


def ids_of(messages: list[dict[str, Any]], template: str = CHATML, **options: Any) -> list[int]:
    return renderer(template).render(messages, **options)


def rendered(messages: list[Any], template: str = CHATML, **options: Any) -> str:
    """The text that reaches the model: decoded from the ids."""
    ids = renderer(template).render(messages, **options)
    return byte_tokenizer().decode(ids, skip_special_tokens=False)


def reference(transformers: Any, tokenizer: Tokenizer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend, chat_template=tokenizer.chat_template, **tokenizer.named_tokens
        )
