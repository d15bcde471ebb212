"""A field that is refused by name, whatever the reason."""

from dataclasses import dataclass
from typing import Any

NOTHING: tuple[Any, ...] = ()
OFF: tuple[Any, ...] = (False,)
EMPTY: tuple[Any, ...] = ([], {}, "")


@dataclass(frozen=True)
class Unsupported:
    field: str
    harmless: tuple[Any, ...]
    """Values beside null that ask for nothing."""
    why: str = "is not supported by this server yet"

    def is_harmless(self, value: Any) -> bool:
        """0 is not false here."""
        return value is None or any(
            value == other and isinstance(value, bool) is isinstance(other, bool) for other in self.harmless
        )
