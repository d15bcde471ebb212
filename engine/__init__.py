"""Octavo's engine. Exports load on first use, so that `import engine.core` loads no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.client import EngineClient as EngineClient
    from engine.llm import LLM as LLM
    from engine.sampling_params import SamplingParams as SamplingParams

_EXPORTS = {
    "LLM": "engine.llm",
    "EngineClient": "engine.client",
    "SamplingParams": "engine.sampling_params",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
