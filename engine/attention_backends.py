"""--attention-backend against what this machine and this model allow: refusals, and words for people.

flags ──┐
device ─┼─> check_backend ─> a StartupError before weights are read, or nothing
model ──┘   attention_in_words, backend_verdicts ─> the start-up block, the doctor
"""

from collections.abc import Iterable, Sequence
from typing import get_args

from configs.kv import KVLayout
from configs.kv_flags import kv_formats, kv_layers, pair_name
from configs.model import SizedConfig
from configs.setting_types import write_size
from configs.settings import Settings
from engine.device import Device
from engine.errors import StartupError
from kernels import flash
from kernels.registry import AUTO, Choice, KVFormats, NoImplementation, Refused, choose, named

USUAL_PAGE = 16
"""Tokens: what larger pages are compared with."""
BACKENDS: tuple[str, ...] = tuple(
    name for name in get_args(Settings.model_fields["attention_backend"].annotation) if name != AUTO
)


def check_backend(settings: Settings, device: Device, config: SizedConfig | None = None) -> None:
    """Raises `StartupError` where the backend that --attention-backend names cannot serve the model or, where that is
    not known (None), a cache in the format that `settings` name."""
    backend = settings.attention_backend
    served = _served(settings, device, config, backend)
    if isinstance(served, Refused):
        instead = backend_verdicts(settings, device, config)[AUTO]
        raise StartupError(
            f"{named(backend)} cannot serve here: {served.reason}. Leave it at auto, and {instead} serves."
        )


def backend_verdicts(settings: Settings, device: Device, config: SizedConfig | None = None) -> dict[str, str]:
    """Of each backend that may be named, whatever `settings` name: who would serve, or why nobody. config: as above."""
    found = {}
    for backend in (AUTO, *BACKENDS):
        served = _served(settings, device, config, backend)
        found[backend] = f"not here ({served.reason})" if isinstance(served, Refused) else ", ".join(served)
    return found


def _served(settings: Settings, device: Device, config: SizedConfig | None, backend: str) -> Iterable[str] | Refused:
    """Who computes attention over each of the formats that layers are kept in; each once."""
    layers = () if config is None else kv_layers(settings, config, device.dtype_name)
    formats = dict.fromkeys(layer.formats for layer in layers) or [kv_formats(settings, device.dtype_name)]
    try:
        served = dict.fromkeys(_choice(device, each, backend).name for each in formats)
    except NoImplementation as error:
        return Refused(grouped([(name, reason) for name, reason in error.refused if reason != named(backend)]))
    for number, layer in enumerate(layers if backend == flash.BACKEND else ()):
        if reason := flash.refuses_layer(layer, config is not None and config.has_sinks):
            return Refused(f"{backend} {reason} (layer {number} of this model)")
    return served


def _choice(device: Device, formats: KVFormats, backend: str) -> Choice:
    return choose("paged_attention", device.place.type, device.dtype, formats, backend)


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
