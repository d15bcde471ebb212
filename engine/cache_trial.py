"""Whether a KV cache in another format than the model's own still gives the model's answers: asked at start, of this
model, with a short text. Nonsense is refused, with its measure and with what works instead."""

import logging
from collections.abc import Iterator, Sequence

from configs.kv_flags import PLAIN, kv_formats, kv_layers
from configs.model import SizedConfig
from configs.settings import Settings
from engine.device import Device
from engine.errors import StartupError
from engine.model.base import CausalLM
from engine.runner.fidelity import MAX_DIVERGENCE, Trial
from engine.runner.kv_scales import Channels

NOTICEABLE = 0.02
"""Nats a token from which on a warning says that answers differ."""
INSTEAD = (("int8", "int4"), ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"))
"""What is tried where a format gives nonsense, the smallest first: keys need more bits than values."""

logger = logging.getLogger("octavo.engine")


def try_cache(
    settings: Settings,
    config: SizedConfig,
    model: CausalLM,
    device: Device,
    token_ids: Sequence[int],
    channels: Sequence[Channels] | None,
) -> str:
    """The measure in words, "" where the cache is in the model's own format (or there is no text).

    token_ids: the text; channels: of the scales file, if there is one. Raises `StartupError` for nonsense.
    """
    plain = config.kv_layers(PLAIN[device.dtype_name])
    layers = kv_layers(settings, config, device.dtype_name)
    if layers == plain or not token_ids:
        return ""
    trial = Trial(model, plain, token_ids, device.place, settings.max_num_batched_tokens)
    found = trial.measure(layers, channels)
    if found.is_nonsense:
        raise StartupError(
            f"{_flags(settings, device)} gives nonsense with this model: {found} (at most {MAX_DIVERGENCE} nats are "
            f"taken). {_advice(settings, config, device, trial)}"
        )
    if found.divergence > NOTICEABLE:
        logger.warning("%s changes this model's answers: %s.", _flags(settings, device), found)
    return str(found)


def _advice(settings: Settings, config: SizedConfig, device: Device, trial: Trial) -> str:
    for other in _others(settings, device):
        found = trial.measure(kv_layers(other, config, device.dtype_name), None)
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
