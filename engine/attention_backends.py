"""--attention-backend against what this machine and this model allow: refusals, and words for people.

the flag ─┐
device ───┼─> check ─> a StartupError before weights are read, or nothing
model ────┘   attention_in_words, backend_verdicts ─> the start-up block, the doctor
"""

from collections.abc import Sequence
from typing import get_args

from configs.kv import KVLayout
from configs.kv_flags import PLAIN, kv_layers, pair_name
from configs.model import SizedConfig
from configs.setting_types import write_size
from configs.settings import Settings
from engine.device import Device
from engine.errors import StartupError
from kernels import flash
from kernels.registry import AUTO, Choice, KVFormats, NoImplementation, choose, named

USUAL_PAGE = 16
"""Tokens: what larger pages are compared with."""
BACKENDS: tuple[str, ...] = tuple(
    name for name in get_args(Settings.model_fields["attention_backend"].annotation) if name != AUTO
)


def check_backend(settings: Settings, device: Device, config: SizedConfig | None = None) -> None:
    """Raises `StartupError` where the backend that --attention-backend names cannot serve the model or, where that is
    not known, any that keeps K and V in its own format."""
    backend, plain = settings.attention_backend, PLAIN[device.dtype_name]
    layers = () if config is None else kv_layers(settings, config, device.dtype_name)
    for formats in dict.fromkeys(layer.formats for layer in layers) or [(plain, plain)]:
        try:
            _choice(device, formats, backend)
        except NoImplementation as error:
            raise _refusal(device, backend, _reasons(error, backend)) from error
    for number, layer in enumerate(layers if backend == flash.BACKEND else ()):
        if reason := flash.refuses_layer(layer, config is not None and config.has_sinks):
            raise _refusal(device, backend, f"{backend} {reason} (layer {number} of this model)")


def _refusal(device: Device, backend: str, reasons: str) -> StartupError:
    plain = PLAIN[device.dtype_name]
    instead = _choice(device, (plain, plain), AUTO).name
    return StartupError(f"{named(backend)} cannot serve here: {reasons}. Leave it at auto, and {instead} serves.")


def _choice(device: Device, formats: KVFormats, backend: str) -> Choice:
    return choose("paged_attention", device.place.type, device.dtype, formats, backend)


def _reasons(error: NoImplementation, backend: str) -> str:
    return grouped([(name, reason) for name, reason in error.refused if reason != named(backend)])


def grouped(refused: Sequence[tuple[str, str]]) -> str:
    """(name, reason) of several: 'C++ AVX2, C++: no compiler; oneDNN: no AMX'"""
    names: dict[str, list[str]] = {}
    for name, reason in refused:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(some)}: {reason}" for reason, some in names.items())


# ------------------------------------------------------------------ in words
def attention_in_words(layout: KVLayout, device: Device, backend: str) -> str:
    """What serves attention, for each of the formats in which layers keep K and V, and why nothing better does."""
    served: dict[str, list[str]] = {}
    for formats in dict.fromkeys(layer.formats for group in layout.groups for layer in group.spec.layers):
        words = described(_choice(device, formats, backend))
        if shared := _shared(layout, device, formats, backend):
            words += f"; {shared}"
        served.setdefault(words, []).append(pair_name(*formats))
    if len(served) == 1:
        return next(iter(served))
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in served.items())


def described(choice: Choice) -> str:
    """What serves an op, and why what would have been preferred does not."""
    return f"{choice.name} (not {grouped(choice.better)})" if choice.better else choice.name


def _shared(layout: KVLayout, device: Device, formats: KVFormats, backend: str) -> str:
    """What flash-attn 2 leaves to others."""
    if _choice(device, formats, backend).name != flash.FLASH_2 or layout.block_size % flash.PAGE == 0:
        return ""
    others = _choice(device, formats, AUTO).name
    return (
        f"it computes prompts of which nothing is cached, and {others} all else, since it reads pages of a multiple of "
        f"{flash.PAGE} tokens only (--block-size {flash.PAGE})"
    )


def cost_of_pages(layout: KVLayout) -> str:
    """Of pages that hold more tokens than is usual."""
    size, usual = (write_size(layout.bytes_per_token * tokens // 2) for tokens in (layout.block_size, USUAL_PAGE))
    return (
        f"{layout.block_size} tokens: in the last page of a sequence {layout.block_size // 2} of them stay empty on "
        f"average, {size} (with pages of {USUAL_PAGE} tokens {usual}); requests that begin alike share whole pages, "
        f"and copy up to {layout.block_size - 1} tokens that they have in common beyond"
    )


def backend_verdicts(device: Device) -> dict[str, str]:
    """Of each backend that may be named: what would serve here with the model's own format of K and V, or why not."""
    plain = PLAIN[device.dtype_name]
    found = {AUTO: _choice(device, (plain, plain), AUTO).name}
    for backend in BACKENDS:
        try:
            found[backend] = _choice(device, (plain, plain), backend).name
        except NoImplementation as error:
            found[backend] = f"not here ({_reasons(error, backend)})"
    return found
