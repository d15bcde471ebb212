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
from engine.runner.fidelity import MAX_DIVERGENCE, Trial
from engine.runner.key_fit import KeyFit
from engine.runner.kv_store import UNSHAPED, Shapings

NOTICEABLE = 0.02
"""Nats a token from which on a warning says that answers differ."""
INSTEAD = (("int8", "int4"), ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"))
"""What is tried where a format gives nonsense, the smallest first: keys need more bits than values."""

logger = logging.getLogger("octavo.engine")


def prepare_cache(
    settings: Settings,
    config: SizedConfig,
    model: CausalLM,
    device: Device,
    texts: tuple[Sequence[int], Sequence[int]],
    window: int,
    static: Sequence[Shapings] | None,
) -> tuple[Sequence[Shapings] | None, str]:
    """What is done to K and V of each layer, and what the trial measured, in words: "" where there was none.

    texts: token ids to try the format with and to fit keys to; window: tokens that the model takes; static: of the file
    of scales, if there is one. Raises `StartupError` for nonsense.
    """
    plain = config.kv_layers(PLAIN[device.dtype_name])
    layers = kv_layers(settings, config, device.dtype_name)
    if layers == plain:
        return None, ""
    tried, read = texts

    @functools.cache
    def fit() -> KeyFit:
        return KeyFit.of(model, plain, read, window, device.place)

    def shapings_of(layers: Sequence[LayerKV]) -> list[Shapings]:
        return fit().shapings(layers) if any(layer.fits_keys for layer in layers) else [UNSHAPED] * len(layers)

    shapings = shapings_of(layers)
    if static is not None:
        shapings = [prefer_static(*both) for both in zip(static, shapings, strict=True)]
    if not tried:
        return shapings, ""
    trial = Trial(model, plain, tried[:window], device.place, settings.max_num_batched_tokens)
    found = trial.measure(layers, shapings)
    if found.is_nonsense:
        raise StartupError(
            f"{_flags(settings, device)} gives nonsense with this model: {found} (at most {MAX_DIVERGENCE} nats are "
            f"taken). {_advice(settings, config, device, trial, shapings_of)}"
        )
    if found.divergence > NOTICEABLE:
        logger.warning("%s changes this model's answers: %s.", _flags(settings, device), found)
    return shapings, str(found)


def prefer_static(static: Shapings, fitted: Shapings) -> Shapings:
    """A layer may have static scales for K or for V alone."""
    (k, v), (fitted_k, _) = static, fitted
    return (fitted_k if k.channels is None else k), v


def _advice(
    settings: Settings,
    config: SizedConfig,
    device: Device,
    trial: Trial,
    shapings_of: Callable[[Sequence[LayerKV]], list[Shapings]],
) -> str:
    for other in _others(settings, device):
        layers = kv_layers(other, config, device.dtype_name)
        found = trial.measure(layers, shapings_of(layers))
        if not found.is_nonsense:
            without = ", without --kv-cache-scales" if settings.kv_cache_scales is not None else ""
            return f"Use {_flags(other, device)}{without}: {found}."
    return "Use --kv-cache-dtype auto."


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
