"""How values are written: sizes, lists, words for no value. `configs/settings.py` declares fields with them."""

import os
import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, Strict

Group = Literal["Model", "KV cache", "Scheduling", "Queue", "HTTP", "Metrics and log", "Machine"]
Unset = tuple[Literal["auto", "none"], str]
"""How to write that a field has no value of its own, and what then holds: 'auto', Octavo chooses; 'none', no limit."""
NO_LIMIT: Unset = ("none", "no limit")
NOTHING = ("none", "null")
"""Words for no value."""

SLIDING_WINDOW = "sliding_window"
"""All layers that have one."""
KV_DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)(b?)|b)?", re.IGNORECASE | re.ASCII)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_API_KEY = re.compile(r"[\x21-\x7e]+")
_ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[\w.~-]+)+", re.ASCII)


def parse_size(text: str) -> int:
    """A count of tokens or bytes as people write it.

    As in vLLM, a small letter counts in thousands and a capital one in 1024s: '32k' is 32,000 and '32K' 32,768. With
    units the usual rule holds: 'KiB', 'MiB', 'GiB' are powers of 1024, 'kB', 'MB', 'GB' powers of 1000 (any case).
    A fraction needs a suffix and is rounded down to a whole number. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or ("." in match[1] and match[2] is None):
        raise ValueError("must be a size such as 4096, 32K, 1.5M or 2.5GiB")
    number, letter, binary, unit = match[1], match[2], match[3], match[4]
    if letter is None:
        return int(number)
    base = 1024 if binary or (letter.isupper() and not unit) else 1000
    return int(Fraction(number) * base ** _POWER[letter.lower()])


def write_size(size: int) -> str:
    """'2.5 GiB': bytes as people read them."""
    value, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _minus_one(value: Any) -> Any:
    return None if value == -1 or (isinstance(value, str) and value.strip() == "-1") else value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _api_key(value: str) -> str:
    if not _API_KEY.fullmatch(value):
        raise ValueError("must be printable ASCII without spaces, and not empty")
    return value


def _root_path(value: str) -> str:
    if value and not _ROOT_PATH.fullmatch(value):
        raise ValueError(
            "must be a path like /llm or /apps/llm: a slash before each part, none at the end; parts, other than . and "
            ".., of ASCII letters, digits and . _ ~ -"
        )
    return value


def _block_size(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def _kv_dtype(value: Any) -> Any:
    """torch's names are understood too."""
    name = _lower(value)
    return KV_DTYPE_ALIASES.get(name, name) if isinstance(name, str) else value


def _layers(value: Any) -> Any:
    """Layers as texts; nothing for 'auto'. A list of one word that stands for all it could hold is that word."""
    if isinstance(value, int | str):
        value = (value,)
    if not isinstance(value, list | tuple):
        return value
    layers = tuple(_lower(str(layer)) if isinstance(layer, int | str) else layer for layer in value)
    return () if layers == ("auto",) else layers


def _layers_are_known(layers: tuple[str, ...]) -> tuple[str, ...]:
    for layer in layers:
        if layer in ("auto", "none") and len(layers) > 1:
            raise ValueError(f"must have {layer} alone")
        if layer not in ("none", SLIDING_WINDOW) and not (layer.isascii() and layer.isdecimal()):
            raise ValueError(f"must be numbers of layers, {SLIDING_WINDOW}, auto or none")
    return layers


String = Annotated[str, Strict(), BeforeValidator(_path)]
"""A path is one too; bytes are none."""
Text = Annotated[String, AfterValidator(_not_empty)]
Size = Annotated[int, BeforeValidator(_size)]
WindowSize = Annotated[int | None, BeforeValidator(_size), BeforeValidator(_minus_one)]
BlockSize = Annotated[int, AfterValidator(_block_size)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_several)]
AdminKey = Annotated[String, AfterValidator(_api_key)]
RootPath = Annotated[String, AfterValidator(_root_path)]
ApiKeys = Annotated[tuple[Annotated[String, AfterValidator(_api_key)], ...], BeforeValidator(_several)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
KVDtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"], BeforeValidator(_kv_dtype)
]
KVLayers = Annotated[tuple[str, ...], AfterValidator(_layers_are_known), BeforeValidator(_layers)]


def setting(default: Any, group: Group, metavar: str, help: str, unset: Unset | None = None, **limits: Any) -> Any:
    """A field with its help; `metavar` stands for the value in --help (words of a Literal are shown instead), `limits`
    are pydantic's (ge, gt, le, …)."""
    word, meaning = unset or ("", "")
    if word:
        help += f" {word}: {meaning}."
    notes: dict[str, JsonValue] = {"group": group, "metavar": metavar, "word": word, "meaning": meaning}
    return Field(default, description=help, json_schema_extra=notes, **limits)
