"""--batch-invariant against what this machine and this model allow.

On a CPU the flag asks for nothing: rows do not depend on others there. On a GPU it asks that Triton computes every op
of a step, linear layers among them. Whether answers then are the same in any company is asked of the loaded model
(`kernels.exactness`, `engine.runner.company`).
"""

from configs.decoder import DecoderConfig
from configs.kv_flags import kv_layers
from configs.model import SizedConfig
from configs.settings import Settings
from engine.device import Device
from engine.errors import StartupError
from kernels import flash
from kernels.registry import AUTO, INVARIANT, NoImplementation, choose
from kernels.triton import offers

ALONE = ("rms_norm", "add_rms_norm", "rotary", "norm_rotary", "gate_mul", "gather_rows", "pack_coded_linear")
"""Ops of a step that are not asked for by formats."""


def linear_backend(settings: Settings, device: Device) -> str:
    """Of `ops.pack_linear`."""
    return INVARIANT if settings.batch_invariant and device.is_gpu else AUTO


def check_invariance(settings: Settings, device: Device, config: SizedConfig | None = None) -> None:
    """Raises `StartupError` where --batch-invariant asks for what cannot be. config: None if it is not known."""
    if linear_backend(settings, device) == INVARIANT and (reason := _refusal(settings, device, config)):
        raise StartupError(f"--{INVARIANT} is not possible here: {reason}.")


def _refusal(settings: Settings, device: Device, config: SizedConfig | None) -> str | None:
    """In words, with what to do, without a full stop."""
    if config is not None and not isinstance(config, DecoderConfig):
        return "the library transformers computes this model, by products that depend on how many rows they have"
    if settings.attention_backend == flash.BACKEND:
        return f"{flash.BACKEND} computes a prompt otherwise when others have cached a part of it; leave it away"
    where = device.place.type, device.dtype
    try:
        choose("pack_linear", *where, None, INVARIANT)
    except NoImplementation as error:
        return f"{offers.NAME}, whose kernels it takes, {dict(error.refused)[offers.NAME]}"
    layers = () if config is None else kv_layers(settings, config, device.dtype_name)
    found = [choose(op, *where) for op in ALONE]
    for formats in dict.fromkeys(layer.formats for layer in layers):
        found += [choose("store_kv", *where, formats)]
        found += [choose("paged_attention", *where, formats, settings.attention_backend)]
    other = next((choice for choice in found if choice.name != offers.NAME), None)
    return None if other is None else f"{other.name} serves {other.op}, and may depend on what else is in a step"
