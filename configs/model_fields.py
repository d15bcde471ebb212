"""Raw model metadata, checked on access: config.json, generation_config.json and GGUF heads under one set of keys."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import StartupError, reason_of

MAX_SIZE = 2**31 - 1
"""No model has a dimension, a vocabulary or a window that is larger; memory is reckoned and tables are made of them."""


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
        return StartupError(f"--model: {self.where}: {name} must be {requirement}, got {self.get(key)!r}.")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value


def read_json(path: Path) -> Fields:
    """A JSON object from disk. Raises `StartupError` where it is missing or is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"--model: {path.parent} holds no {path.name}, so it is not a model folder.") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"--model: {path} cannot be read as JSON: {reason_of(error)}.") from None
    if not isinstance(values, dict):
        raise StartupError(f"--model: {path} must hold a JSON object, got {type(values).__name__}.")
    return Fields(str(path), values)
