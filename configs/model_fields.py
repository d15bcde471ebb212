"""Raw model metadata, checked on access: config.json, generation_config.json and GGUF heads under one set of keys."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import StartupError, reason_of, shown

MAX_SIZE = 2**31 - 1
"""No model has a dimension, a vocabulary or a window that is larger; memory is reckoned and tables are made of them."""
MIN_POSITIONS = 2
"""The shortest window: a token of a prompt, and one of its answer."""
MAX_SHOWN = 200
"""Characters of a value that a complaint repeats."""
_WEIGHT_FILE = re.compile(r"[^/\\\0]+\.safetensors")


@dataclass(frozen=True)
class Fields:
    """Values under the keys of config.json. Every complaint names the file, its own key and the value."""

    where: str
    values: Mapping[str, Any]
    own_keys: Mapping[str, str] = field(default_factory=dict)
    """config.json key -> the file's own name of it, where that differs (GGUF)."""

    def get(self, key: str) -> Any:
        """The value, None where absent or null."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(key, f"an integer of at least {low}")
        if value > high:
            raise self.wrong(key, f"at most {high}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a number")
        if not low <= value <= high:
            raise self.wrong(key, f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}")
        return float(value)

    def positive(self, key: str, default: float | None = None, high: float = math.inf) -> float:
        value = self.number(key, default, high=high)
        if value == 0.0:
            raise self.wrong(key, "above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def token_ids(self, key: str, vocabulary: int) -> tuple[int, ...]:
        """One id of a vocabulary of that size, or a list of them; none where absent."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise self.wrong(key, f"a token id or a list of them (ids of this vocabulary are 0 to {vocabulary - 1})")
        return tuple(ids)

    def nested(self, key: str) -> "Fields":
        """The mapping under `key`; empty where absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "a mapping")
        return Fields(f"{self.where}: {key}", value or {}, self.own_keys)

    def with_defaults(self, **values: Any) -> "Fields":
        """The same, with `values` under the keys that are absent; null stays null."""
        return Fields(self.where, {**values, **self.values}, self.own_keys)

    def with_values(self, **values: Any) -> "Fields":
        """The same, with `values` in place of its own."""
        return Fields(self.where, {**self.values, **values}, self.own_keys)

    def wrong(self, key: str, requirement: str) -> StartupError:
        name = self.own_keys.get(key, key)
        if self.get(key) is None:
            return StartupError(f"--model: {self.where}: {name} is missing; it must be {requirement}.")
        return StartupError(
            f"--model: {self.where}: {name} must be {requirement}, got {shown(self.get(key), MAX_SHOWN)}."
        )

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value


def read_json(path: Path, needed: bool = True) -> Fields:
    """A JSON object from disk. Raises `StartupError` where it is missing, if it is `needed`, or is none."""
    if not needed and not path.exists():
        return Fields(str(path), {})
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"--model: {path.parent} holds no {path.name}, so it is not a model folder.") from None
    except RecursionError:
        raise StartupError(f"--model: {path} cannot be read as JSON: it is nested too deeply.") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"--model: {path} cannot be read as JSON: {reason_of(error)}.") from None
    if not isinstance(values, dict):
        raise StartupError(f"--model: {path} must hold a JSON object, got {type(values).__name__}.")
    return Fields(str(path), values)


def read_weight_map(path: Path) -> dict[str, str]:
    """Weight name -> name of the file beside `path` that holds it, of an index of safetensors. Raises `StartupError`
    for one that is damaged, and for names that lead out of the folder."""
    index = read_json(path)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise index.wrong("weight_map", "a file name for each weight")
    for name, file in files.items():
        if not isinstance(file, str) or not _WEIGHT_FILE.fullmatch(file) or not file.isprintable():
            place = f"--model: {path}: weight_map: the file of {shown(name)}"
            raise StartupError(f"{place} must be the name of a *.safetensors file beside it, got {shown(file)}.")
    return files
