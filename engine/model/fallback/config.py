"""Sizes of a model that the library transformers runs: read off its own code, which is run once without weights.

The class is built on the meta device, where tensors have shapes and no memory, and called with an attention function
that notes what each layer asks for. What Octavo's attention cannot do is refused here, before any weights are read.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from configs.model import ModelConfig, ModelFiles
from configs.model_fields import MIN_POSITIONS, Fields
from configs.model_rope import windows
from configs.probed import LayerCall, ProbedConfig
from configs.supported import check, refusal
from engine.errors import StartupError
from engine.model.fallback.attention import NAME, Asked, Unsuitable
from engine.model.fallback.model import TransformersModel, fix_rope

PROBE_TOKENS = 3
MAX_REASON = 500
"""Characters of a library's message that are passed on."""
Refuse = Callable[[str], StartupError]


@dataclass(frozen=True)
class TransformersConfig(ProbedConfig):
    """Made by `read_transformers_config`."""

    path: Path
    trust_remote_code: bool


def read_transformers_config(path: Path, declared: ModelConfig, trust_remote_code: bool) -> TransformersConfig:
    """path: a model folder. Raises `StartupError` that names what was found and what is supported."""
    given = ModelFiles.read(path).config

    def refuse(words: str) -> StartupError:
        return refusal(given, words)

    theirs, model_class = model_class_of(path, trust_remote_code)
    _check_class(model_class, declared.architecture, refuse)
    num_layers = _size(theirs, "num_hidden_layers", 1, refuse)
    max_position = _size(theirs, "max_position_embeddings", MIN_POSITIONS, refuse)
    recorder = _Recorder()
    try:
        with quiet(), torch.device("meta"), torch.inference_mode():
            model = model_class(configured(theirs, torch.bfloat16)).eval()
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            fix_rope(model, max_position)
            ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64)
            taken_apart = TransformersModel(model)
            logits = taken_apart.logits(taken_apart.run(ids, ids, recorder))
    except Exception as error:
        raise refuse(
            f"transformers' {model_class.__name__} cannot be run over a paged KV cache ({reason(error)})"
        ) from error
    _check_calls(recorder, num_layers, refuse)
    both = _windows(theirs, max_position)
    _check_windows(recorder.calls, theirs, both[1], refuse)
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    return TransformersConfig(
        architecture=declared.architecture,
        vocab_size=logits.shape[-1],
        dtype=declared.dtype,
        generation=declared.generation,
        path=path,
        trust_remote_code=trust_remote_code,
        windows=both,
        calls=tuple(recorder.calls),
        parameters=parameters,
        tied_parameters=head.weight.numel() if tied else 0,
    )


def model_class_of(path: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """transformers' configuration of the model and its class: the library's own where it has one, else, if trusted,
    the model's. Raises `StartupError`."""
    given = ModelFiles.read(path).config
    own_code = given.get("auto_map")
    own_class = own_code.get("AutoModelForCausalLM") if isinstance(own_code, dict) else None
    kind = given.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    library = f"transformers {transformers.__version__}"
    if not known and own_class is None:
        raise refusal(given, f"{library} does not have it; a newer release may")
    if not known and any("--" in str(place) for place in own_code.values()):
        raise refusal(given, "its code is in another repository: put it into the model's own folder")
    if not known and not trust_remote_code:
        raise refusal(
            given,
            f"{library} does not have it, and it brings Python code of its own, which --trust-remote-code runs: only "
            "for authors you trust",
        )
    try:
        with quiet():
            theirs = AutoConfig.from_pretrained(path, trust_remote_code=not known, local_files_only=True)
            check(Fields(given.where, {**theirs.to_dict(), "architectures": given.get("architectures")}))
            if known:
                return theirs, AutoModelForCausalLM._model_mapping.get(type(theirs), None)
            return theirs, get_class_from_dynamic_module(str(own_class), path, local_files_only=True)
    except StartupError:
        raise
    except (Exception, SystemExit) as error:  # its own code may do anything
        raise refusal(given, f"{library} cannot read its configuration ({reason(error)})") from error


def configured(theirs: Any, dtype: torch.dtype) -> Any:
    """The configuration, such that a class made of it calls our attention and experts."""
    theirs._attn_implementation = NAME
    theirs._experts_implementation = NAME
    theirs.dtype = dtype
    return theirs


@contextmanager
def quiet() -> Iterator[None]:
    """The library's warnings and bars say nothing that our own sentences do not."""
    level, has_bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers.logging.set_verbosity(level)
        if has_bars:
            transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def reason(error: BaseException) -> str:
    """Our own words, or the first line of a library's message. Where it found a value of the wrong kind, the sentence
    about key and value stands in the error's cause."""
    if isinstance(error, Unsuitable):
        return str(error)
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:MAX_REASON]}".rstrip(" .:")


# ------------------------------------------------------------------ the probe
@dataclass
class _Recorder:
    """A step that notes what layers ask for."""

    calls: list[LayerCall] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __call__(self, asked: Asked) -> torch.Tensor:
        (_, heads, _), (_, kv_heads, head_dim), (*_, value_dim) = asked.q.shape, asked.k.shape, asked.v.shape
        if asked.layer is None:
            self.complaints.append("an attention layer does not say which it is")
        if head_dim != value_dim or head_dim % 2 or heads % kv_heads:
            self.complaints.append(
                f"{heads} query heads and keys of {kv_heads} x {head_dim} numbers beside values of "
                f"{asked.v.shape[1]} x {value_dim}"
            )
        for name, value in (("multiplied by", asked.scale), ("capped at", asked.softcap)):
            is_number = isinstance(value, float | int)
            if not (value is None or isinstance(value, torch.Tensor) or (is_number and 0.0 < value < math.inf)):
                self.complaints.append(f"scores of attention {name} {value}, which must be a number above 0")
        if not asked.is_causal:
            self.complaints.append("attention to later tokens")
        if asked.others:
            self.complaints.append(f"attention with {', '.join(asked.others)}")
        has_sinks = asked.sinks is not None
        self.calls.append(LayerCall(asked.layer or 0, heads, kv_heads, head_dim, asked.window, has_sinks))
        return asked.q.new_empty(len(asked.q), heads * value_dim)


def _size(theirs: Any, key: str, least: int, refuse: Refuse) -> int:
    size = getattr(theirs, key, None)
    if not isinstance(size, int) or size < least:
        raise refuse(f"its configuration has no {key} of at least {least} (but {size!r})")
    return size


def _check_class(model_class: Any, architecture: str, refuse: Refuse) -> None:
    """A name that the library does not have is an older one of the same (its model_type was found)."""
    if model_class is None:
        raise refuse("transformers has no class of it that generates text")
    name = model_class.__name__
    if architecture != name and hasattr(transformers, architecture):
        raise refuse(f"its weights are of another task; text is generated with {name}")
    if not model_class._supports_attention_backend:
        raise refuse(
            f"transformers' {name} has no attention that can be replaced: it keeps another state than keys and "
            "values, or its code is of an older kind"
        )


def _check_calls(recorder: _Recorder, num_layers: int, refuse: Refuse) -> None:
    if recorder.complaints:
        raise refuse(f"it needs {recorder.complaints[0]}")
    layers = [call.layer for call in recorder.calls]
    if sorted(layers) != list(range(num_layers)):
        raise refuse(
            f"each of its {num_layers} layers would have to use attention once, over keys and values of its own; it is "
            f"used {len(layers)} times, in {len(set(layers))} layers"
        )
    recorder.calls.sort(key=lambda call: call.layer)


def _check_windows(calls: list[LayerCall], theirs: Any, max_window: int, refuse: Refuse) -> None:
    """A window that stands in the library's mask alone, where attention is not told of it, would be ignored."""
    window = getattr(theirs, "sliding_window", None)
    if not isinstance(window, int) or window >= max_window or getattr(theirs, "use_sliding_window", True) is False:
        return
    kinds = getattr(theirs, "layer_types", None)
    slide = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * len(calls)
    untold = [call.layer for call, slides in zip(calls, slide, strict=True) if slides and call.window is None]
    if (kinds and untold) or len(untold) == len(calls):
        raise refuse(f"its window of {window} tokens stands in masks alone, which are not built (layer {untold[0]})")


def _windows(theirs: Any, max_position: int) -> tuple[int, int]:
    """(tokens of context served by default, tokens that may be asked for)"""
    rope = getattr(theirs, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    original = rope.get("original_max_position_embeddings") or max_position
    return windows(str(rope.get("rope_type")), float(rope.get("factor") or 1.0), original, max_position)
