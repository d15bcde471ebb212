"""A KV cache in another format than the model's own, made ready at start.

    a text ─> its second part: keys are fitted, so that they lose little (`engine.runner.key_fit`)
       └────> its first part: the format is tried. Does it still give the model's answers? Nonsense is refused

The two parts differ, so that a fit is not judged by what it was made from.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from configs.kv import LayerKV
from configs.kv_flags import PLAIN, kv_formats, kv_layers
from configs.model import SizedConfig
from configs.settings import Settings
from engine.device import Device
from engine.errors import StartupError
from engine.model.base import CausalLM
from engine.runner.fidelity import MAX_DIVERGENCE, Fidelity, Trial
from engine.runner.key_fit import KeyFit
from engine.runner.kv_store import UNTRANSFORMED, KVTransforms

NOTICEABLE = 0.02
"""Nats a token from which on a warning says that answers differ."""
INSTEAD = (("int8", "int4"), ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"))
"""What is tried where a format changes answers, the smallest first: keys need more bits than values."""

logger = logging.getLogger("octavo.engine")


def prepare_cache(
    settings: Settings,
    config: SizedConfig,
    model: CausalLM,
    device: Device,
    texts: tuple[Sequence[int], Sequence[int]],
    window: int,
    static: Sequence[KVTransforms] | None,
) -> tuple[Sequence[KVTransforms] | None, Fidelity | None]:
    """What is done to K and V of each layer, and what the trial measured: None where there was none.

    texts: token ids to try the format with and to fit keys to; window: tokens that the model takes; static: of the file
    of scales, if there is one. Raises `StartupError` for nonsense.
    """
    plain = config.kv_layers(PLAIN[device.dtype_name])
    layers = kv_layers(settings, config, device.dtype_name)
    if layers == plain:
        return None, None
    tried, read = texts

    @functools.cache
    def fit() -> KeyFit:
        return KeyFit.of(model, plain, read, window, device.place)

    def transforms_of(layers: Sequence[LayerKV]) -> list[KVTransforms]:
        return fit().transforms(layers) if any(layer.fits_keys for layer in layers) else [UNTRANSFORMED] * len(layers)

    transforms = transforms_of(layers)
    if static is not None:
        transforms = [prefer_static(*both) for both in zip(static, transforms, strict=True)]
    if not tried:
        return transforms, None
    trial = Trial(model, plain, tried[:window], device.place, settings.step_tokens(device.is_gpu))
    found = trial.measure(layers, transforms)
    if found.is_nonsense:
        better = _better(settings, config, device, trial, transforms_of, MAX_DIVERGENCE)
        raise StartupError(
            f"{_flags(settings, device)} gives nonsense with this model: {found} (at most {MAX_DIVERGENCE} nats are "
            f"taken). Use {better or '--kv-cache-dtype auto'}."
        )
    if found.divergence > NOTICEABLE:
        better = _better(settings, config, device, trial, transforms_of, NOTICEABLE)
        hint = f" Nearer: {better}." if better else ""
        logger.warning("%s changes this model's answers: %s.%s", _flags(settings, device), found, hint)
    return transforms, found


def prefer_static(static: KVTransforms, fitted: KVTransforms) -> KVTransforms:
    """A layer may have static scales for K or for V alone."""
    (k, v), (fitted_k, _) = static, fitted
    return (fitted_k if k.channels is None else k), v


def _better(
    settings: Settings,
    config: SizedConfig,
    device: Device,
    trial: Trial,
    transforms_of: Callable[[Sequence[LayerKV]], list[KVTransforms]],
    limit: float,
) -> str:
    """The smallest format within `limit` nats a token, and what was measured: "" where there is none."""
    for other in _others(settings, device):
        layers = kv_layers(other, config, device.dtype_name)
        found = trial.measure(layers, transforms_of(layers))
        if found.divergence <= limit:
            without = ", without --kv-cache-scales" if settings.kv_cache_scales is not None else ""
            return f"{_flags(other, device)}{without}: {found}"
    return ""


def _others(settings: Settings, device: Device) -> Iterator[Settings]:
    """With as many bits or more, and scales of their own."""

    def bits(settings: Settings) -> int:
        return sum(format.bits for format in kv_formats(settings, device.dtype_name))

    for k_name, v_name in INSTEAD:
        changes = {"kv_cache_dtype": k_name, "kv_cache_dtype_v": v_name, "kv_cache_scales": None}
        other = settings.model_copy(update=changes)
        if bits(other) >= bits(settings) and _flags(other, device) != _flags(settings, device):
            yield other


def _flags(settings: Settings, device: Device) -> str:
    k_format, v_format = kv_formats(settings, device.dtype_name)
    words = f"--kv-cache-dtype {k_format.value}"
    if v_format is not k_format:
        words += f" --kv-cache-dtype-v {v_format.value}"
    if settings.kv_cache_scales is not None:
        words += f" --kv-cache-scales {settings.kv_cache_scales}"
    return words
