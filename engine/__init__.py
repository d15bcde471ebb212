"""Octavo's engine. Exports load on first use, so that `import engine.core` loads no torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.admission import Envelope as Envelope
    from engine.admission import about_prompt as about_prompt
    from engine.calibration import calibrate as calibrate
    from engine.client import EngineClient as EngineClient
    from engine.diagnosis import Diagnosis as Diagnosis
    from engine.diagnosis import diagnose as diagnose
    from engine.errors import ContextLengthExceeded as ContextLengthExceeded
    from engine.errors import EngineDead as EngineDead
    from engine.errors import InvalidRequest as InvalidRequest
    from engine.errors import NotReady as NotReady
    from engine.errors import OctavoError as OctavoError
    from engine.errors import Overloaded as Overloaded
    from engine.errors import RequestFailed as RequestFailed
    from engine.errors import StartupError as StartupError
    from engine.errors import ending as ending
    from engine.kv_scales import scales_of as scales_of
    from engine.llm import LLM as LLM
    from engine.logs import configure_logging as configure_logging
    from engine.logs import is_json as is_json
    from engine.messages import EngineLoading as EngineLoading
    from engine.messages import EngineReady as EngineReady
    from engine.messages import KVReport as KVReport
    from engine.messages import Launch as Launch
    from engine.messages import RequestSummary as RequestSummary
    from engine.messages import Stats as Stats
    from engine.messages import TextDelta as TextDelta
    from engine.messages import TokenLogprobs as TokenLogprobs
    from engine.ports import Observer as Observer
    from engine.request_stream import RequestStream as RequestStream
    from engine.sampling_params import MAX_ALLOWED_TOKEN_IDS as MAX_ALLOWED_TOKEN_IDS
    from engine.sampling_params import MAX_LOGIT_BIAS as MAX_LOGIT_BIAS
    from engine.sampling_params import MAX_STOP_STRING_CHARS as MAX_STOP_STRING_CHARS
    from engine.sampling_params import SamplingParams as SamplingParams
    from engine.served_model import ServedModel as ServedModel
    from engine.source import find_config as find_config
    from engine.source import resolve as resolve
    from engine.source import sizes_of as sizes_of
    from engine.text.tokenizer import Tokenizer as Tokenizer
    from engine.waiting_line import QueueLimits as QueueLimits

_EXPORTS = {
    "LLM": "engine.llm",
    "MAX_ALLOWED_TOKEN_IDS": "engine.sampling_params",
    "MAX_LOGIT_BIAS": "engine.sampling_params",
    "MAX_STOP_STRING_CHARS": "engine.sampling_params",
    "SamplingParams": "engine.sampling_params",
    # what the server builds on
    "EngineClient": "engine.client",
    "QueueLimits": "engine.waiting_line",
    "RequestStream": "engine.request_stream",
    "ServedModel": "engine.served_model",
    "Envelope": "engine.admission",
    "about_prompt": "engine.admission",
    "find_config": "engine.source",
    "resolve": "engine.source",
    "sizes_of": "engine.source",
    "scales_of": "engine.kv_scales",
    "Tokenizer": "engine.text.tokenizer",
    "Observer": "engine.ports",
    "Diagnosis": "engine.diagnosis",
    "diagnose": "engine.diagnosis",
    "calibrate": "engine.calibration",
    "configure_logging": "engine.logs",
    "is_json": "engine.logs",
    # messages
    "EngineLoading": "engine.messages",
    "EngineReady": "engine.messages",
    "KVReport": "engine.messages",
    "Launch": "engine.messages",
    "RequestSummary": "engine.messages",
    "Stats": "engine.messages",
    "TextDelta": "engine.messages",
    "TokenLogprobs": "engine.messages",
    # errors
    "OctavoError": "engine.errors",
    "StartupError": "engine.errors",
    "InvalidRequest": "engine.errors",
    "ContextLengthExceeded": "engine.errors",
    "NotReady": "engine.errors",
    "Overloaded": "engine.errors",
    "EngineDead": "engine.errors",
    "RequestFailed": "engine.errors",
    "ending": "engine.errors",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """With the exports that have not been used yet: for completion in an interpreter."""
    return sorted({*globals(), *_EXPORTS})
