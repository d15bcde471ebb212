"""Weights into a class of transformers, our layers into it, and a check of what came out beside the library's own code.

The check is for classes that nobody here has read: one that looks at anything which Octavo does not keep (another
layer's keys, a mask, a state) gives other numbers over a few tokens, and is refused. What shows only over many tokens,
as windows do, it cannot find.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from engine.errors import StartupError
from engine.model.fallback.attention import NAME, Asked
from engine.model.fallback.config import TransformersConfig, configured, model_class_of, quiet, reason
from engine.model.fallback.model import TransformersModel, fix_rope, is_experts, replace_layers
from engine.model.weights import SafetensorsSource, check_kinds, ignorable, named
from kernels.reference.attention import attend_together
from kernels.reference.pages import Past

PROMPT, THEIR_CHUNKS, OUR_CHUNKS = 12, [8, 3, 1], [5, 7]
"""Tokens of the check, and how each side is fed: differently, so that what mixes a call's tokens shows."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of the size of the logits. Another mask, or a forgotten state, differs by about 1."""


def load_transformers_model(
    config: TransformersConfig,
    dtype: torch.dtype,
    window: int,
    progress: Callable[[float], None],
    device: torch.device,
) -> TransformersModel:
    """In eval mode. Raises `StartupError` for weights that are missing, damaged or do not fit, and for a class that
    does not give transformers' own numbers over Octavo's attention."""
    _check_files(config)
    model = _read(config, dtype).to(device)
    fix_rope(model, window)
    has_experts = any(is_experts(module) for module in model.modules())
    ids = torch.arange(PROMPT, device=device) * 31 % config.vocab_size
    try:
        expected = _theirs(model, ids)
        replace_layers(model, progress)
        ours = TransformersModel(model).eval()
        differences = (_ours(ours, config, ids) - expected).norm(dim=1) / expected.norm(dim=1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise StartupError(f"--model: {config.architecture} cannot be run by Octavo ({reason(error)}).") from error
    # Of the rows: where experts are chosen, a near tie may turn over in some.
    difference = float(differences.median() if has_experts else differences.max())
    if not difference <= TOLERANCE[dtype]:
        raise StartupError(
            f"--model: {config.architecture} does not give transformers' own numbers over a paged KV cache (they are "
            f"off by {difference:.2g} of their size): it keeps or reads something that Octavo does not know of."
        )
    return ours


def _check_files(config: TransformersConfig) -> None:
    """Raises `StartupError` in our own words for what is missing, damaged or not to be read as it stands."""
    source = SafetensorsSource(config.path)
    check_kinds(source, (name for name in source.shapes if name.endswith("weight")))  # others may be masks
    if (config.path / "adapter_config.json").exists():
        raise StartupError(
            f"--model: {config.path} holds an adapter (adapter_config.json): merge it into the model's weights first."
        )


def _read(config: TransformersConfig, dtype: torch.dtype) -> Any:
    """The class with its weights, in main memory, without gradients."""
    theirs, model_class = model_class_of(config.path, config.trust_remote_code)
    try:
        with quiet():
            model, found = model_class.from_pretrained(
                config.path,
                config=configured(theirs, dtype),
                dtype=dtype,
                attn_implementation=NAME,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # told below, in our words
                output_loading_info=True,
            )
    except Exception as error:
        raise StartupError(f"--model: the weights in {config.path} cannot be loaded ({reason(error)}).") from error
    problems = (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "holds, in another shape,"),
        ("unexpected_keys", "holds, with no place for it,"),
    )
    for key, words in problems:
        keys = (each[0] if isinstance(each, tuple) else each for each in found.get(key) or ())  # with its shapes
        if names := sorted(name for name in keys if not ignorable(name)):
            raise StartupError(
                f"--model: {config.path} {words} {named(names)}: the weights and the configuration do not belong "
                "together."
            )
    return model.eval().requires_grad_(False)


def _theirs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [PROMPT, vocab] by the library's own attention, experts and cache."""
    model.set_attn_implementation("eager")
    if has_experts := model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options = {keyword: DynamicCache(config=model.config), "use_cache": True}
    with quiet(), torch.inference_mode():
        logits = [model(input_ids=chunk[None], **options).logits[0] for chunk in torch.split(ids, THEIR_CHUNKS)]
    model.set_attn_implementation(NAME)
    if has_experts:
        model.set_experts_implementation(NAME)
    return torch.cat(logits).float()


class _Contiguous:
    """A step over keys and values that are kept side by side: Octavo's arithmetic without its pages."""

    def __init__(self, windows: dict[int, int | None]) -> None:
        self.windows = windows
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, asked: Asked) -> torch.Tensor:
        assert asked.layer is not None
        k, v = asked.k, asked.v
        if asked.layer in self._kept:
            k, v = (torch.cat(parts) for parts in zip(self._kept[asked.layer], (k, v), strict=True))
        self._kept[asked.layer] = k, v
        k_past, v_past = (Past(x.transpose(0, 1).float()) for x in (k, v))
        out = torch.empty_like(asked.q)
        window = self.windows[asked.layer]
        attend_together(asked.q, k_past, v_past, float(asked.scale), window, asked.softcap, asked.sinks, out)
        return out.flatten(1)


def _ours(model: TransformersModel, config: TransformersConfig, ids: torch.Tensor) -> torch.Tensor:
    """Logits [PROMPT, vocab] by the model as it will serve."""
    step = _Contiguous({call.layer: call.window for call in config.calls})
    positions = torch.arange(len(ids), device=ids.device)
    with torch.inference_mode():
        chunks = zip(torch.split(ids, OUR_CHUNKS), torch.split(positions, OUR_CHUNKS), strict=True)
        return torch.cat([model.logits(model.run(*chunk, step)) for chunk in chunks]).float()
