"""What a section of the check script found: verdicts, which may fail the whole, and figures, which are only told."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Finding:
    """A line of the table."""

    what: str
    text: str
    """What was found, in words or as a number with its unit."""
    ok: bool | None = None
    """None: a figure."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """For whoever reads the JSON."""


class Findings:
    """Of one section. Written to a file with every line: what a section has found stays, whatever becomes of it."""

    def __init__(self, path: Path | None = None) -> None:
        self.lines: list[Finding] = []
        self._path = path

    def add(self, line: Finding) -> None:
        self.lines.append(line)
        if self._path is not None:
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps([asdict(each) for each in self.lines]))
            partial.replace(self._path)

    def extend(self, other: "Findings") -> None:
        for line in other.lines:
            self.add(line)

    def verdict(self, what: str, ok: bool, text: str = "", **numbers: Any) -> None:
        self.add(Finding(what, text or ("right" if ok else "WRONG"), ok, numbers))

    def figure(self, what: str, text: str, **numbers: Any) -> None:
        self.add(Finding(what, text, None, numbers))

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Whatever is raised inside is a verdict: wrong. The next case still runs."""
        try:
            yield
        except Exception as error:
            words = " ".join(str(error).split())[:400]
            self.verdict(what, False, f"{type(error).__name__}: {words}")

    @classmethod
    def read(cls, path: Path) -> "Findings":
        """What a section has written; nothing where it has not come so far."""
        found = cls()
        if path.exists():
            found.lines = [Finding(**line) for line in json.loads(path.read_text())]
        return found
