"""Finds scales for K and V that hold for a model whatever it reads: `octavo calibrate`.

text ─> the model, as it serves (`engine.runner.observing`) ─> the largest |K| and |V| of each layer, head and dim
─> scales
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from configs.files import open_text
from configs.kv import KVFormat, LayerKV
from configs.kv_flags import PLAIN, format_name, kv_formats, kv_layers
from configs.settings import Settings
from engine.device import Device
from engine.errors import StartupError
from engine.kv_scales import KVScales
from engine.model.interface import AttentionLayer
from engine.model.registry import load_model, read_config
from engine.runner.observing import observe
from engine.source import resolve
from engine.text.sample import SAMPLE
from engine.text.tokenizer import Tokenizer
from kernels.reference.kv_formats import LARGEST

Granularity = Literal["channel", "tensor"]
PIECE = 512
"""Tokens of the text that see each other."""
MIN_TOKENS, MAX_TOKENS = 256, 64 * PIECE
"""Of a text: with fewer, extremes do not show; more are not read."""
HEADROOM: dict[Granularity, float] = {"channel": 1.25, "tensor": 1.0}
"""How much larger than in the text a number may become before it is cut off. Measured over another text: with 1.25 the
divergence of int8 is 2/3 of that with 1; the largest number of a whole layer is hardly ever exceeded."""
MAX_CHARACTERS = 32 * MAX_TOKENS
"""Of a text: far more than so many tokens have."""
FLOOR = 2.0**-10
"""Of the largest number of its head: a dim that was never larger in the text counts as this large."""
TINY = 1e-6


def calibrate(
    settings: Settings, text: Path | None, granularity: Granularity, report: Callable[[str, float], None]
) -> KVScales:
    """Loads --model and reads the file `text` with it (None: `SAMPLE`). Formats: as --kv-cache-dtype says, else int8;
    a half whose format has no such scales gets those of the other half's format.

    report: gets a phase in words and the fraction of it that is done. Raises `StartupError`.
    """
    if settings.kv_cache_dtype == "auto":
        settings = settings.model_copy(update={"kv_cache_dtype": "int8"})
    words = SAMPLE if text is None else read_text(text)
    source = resolve(settings, progress=report)
    tokenizer = Tokenizer.load(source)
    device = Device.find(settings)
    formats = _formats(settings, device)
    config = read_config(source.path, settings.trust_remote_code)
    kv_layers(settings, config, device.dtype_name)  # what octavo serve would refuse is of no use
    window = config.effective_window(settings.max_model_len)
    pieces = split(tokenizer, words, window)
    device.prepare()

    def loading(fraction: float) -> None:
        report("loading weights", fraction)

    with device.enough_memory("the weights"):
        quantization = config.weight_format(settings.quantization, device.is_gpu)
        model = load_model(source.path, config, device.dtype, window, loading, device.place, quantization)
    layers = config.kv_layers(PLAIN[device.dtype_name])
    largest = Largest(layers, device.place)

    def reading(fraction: float) -> None:
        report("reading the text", fraction)

    with device.enough_memory("a step"):
        observe(model, layers, pieces, window, device.place, largest.see, reading)
    scales = tuple((k.numpy(), v.numpy()) for k, v in largest.scales(formats, granularity))
    return KVScales(config.architecture, formats, granularity, sum(map(len, pieces)), scales)


def _formats(settings: Settings, device: Device) -> tuple[KVFormat, KVFormat]:
    """For which scales of (K, V) are found."""
    formats = kv_formats(settings, device.dtype_name)
    able = [format for format in formats if format.may_be_static]
    if not able:
        raise StartupError(
            "octavo calibrate finds scales for fp8 and int8, and the KV cache is to be "
            f"{format_name(settings, device.dtype_name)}: use --kv-cache-dtype int8 or fp8."
        )
    k_format, v_format = (format if format.may_be_static else able[0] for format in formats)
    return k_format, v_format


def read_text(path: Path) -> str:
    """Raises `StartupError`."""
    with open_text("--text", path) as file:
        return file.read(MAX_CHARACTERS)


def split(tokenizer: Tokenizer, text: str, window: int) -> list[list[int]]:
    """Token ids of `text` in pieces of at most `PIECE` (and `window`) tokens, each begun as a text begins."""
    first = tokenizer.encode("", add_special_tokens=True)
    size = min(PIECE, window) - len(first)
    ids = tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS]
    if len(ids) < MIN_TOKENS:
        raise StartupError(f"--text: the text has {len(ids)} tokens, and {MIN_TOKENS} are needed at least.")
    return [first + ids[start : start + size] for start in range(0, len(ids), size)]


class Largest:
    """The largest |K| and |V| of each layer, head and dim."""

    def __init__(self, layers: tuple[LayerKV, ...], device: torch.device) -> None:
        shapes = [(layer.kv_heads, layer.head_dim) for layer in layers]
        self.found = [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for shape in shapes]
        """(of K, of V) of each layer, fp32 [kv_heads, head_dim]"""

    def see(self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for found, x in zip(self.found[layer.index], (k, v), strict=True):
            torch.maximum(found, x.abs().amax(dim=0).float(), out=found)

    def scales(
        self, formats: tuple[KVFormat, KVFormat], granularity: Granularity
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Raises `StartupError` where the model's numbers were not finite."""
        if not all(bool(x.isfinite().all()) for both in self.found for x in both):
            raise StartupError("--model: its keys and values are not finite in this --dtype: try --dtype float32.")
        scaled = []
        for both in self.found:
            k, v = (_scales(x.cpu(), format, granularity) for x, format in zip(both, formats, strict=True))
            scaled.append((k, v))
        return tuple(scaled)


def _scales(largest: torch.Tensor, format: KVFormat, granularity: Granularity) -> torch.Tensor:
    """fp32 [kv_heads, head_dim]: what the largest number is divided by to become the largest code."""
    if granularity == "tensor":
        largest = largest.max().expand_as(largest)
    floor = largest.amax(dim=1, keepdim=True) * FLOOR
    return torch.maximum(largest, floor).clamp_min(TINY) * (HEADROOM[granularity] / LARGEST[format])
