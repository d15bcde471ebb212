"""From flags to formats: what each layer of a model keeps of a token, and how.

    --dtype, --kv-cache-dtype and what belongs to it ─┐
                                                      ├─> kv_layers ─> KVLayout ─> pools, kernels, the planner
    what the model's layers keep ─────────────────────┘

No other place does that: engine, planner, doctor and tests ask here.
"""

from collections.abc import Sequence
from dataclasses import replace

from configs.errors import SettingsError
from configs.kv import INT4_GROUP, KVFormat, KVLayout, LayerKV
from configs.model import DType, SizedConfig
from configs.setting_types import SLIDING_WINDOW
from configs.settings import Settings

PLAIN: dict[DType, KVFormat] = {"bfloat16": KVFormat.BF16, "float16": KVFormat.FP16, "float32": KVFormat.FP32}
"""How a model that computes in a format keeps K and V, unless told otherwise."""
SCALES = {
    KVFormat.FP8_E4M3: "a scale for each token and head",
    KVFormat.FP8_E5M2: "no scales",
    KVFormat.INT8: "a scale for each token and head",
    KVFormat.INT4: f"a scale and a zero point for each token and {INT4_GROUP} numbers",
}


def kv_layers(settings: Settings, model: SizedConfig, dtype: DType) -> tuple[LayerKV, ...]:
    """All of the model's layers, in order. dtype: what it computes in (--dtype, resolved).

    Raises `StartupError` that names flag, value and limit.
    """
    plain = model.kv_layers(PLAIN[dtype])
    k_format, v_format = kv_formats(settings, dtype)
    static = settings.kv_cache_scales is not None
    if static and not (k_format.may_be_static or v_format.may_be_static):
        raise SettingsError(
            f"--kv-cache-scales {settings.kv_cache_scales} is for a KV cache in fp8_e4m3 or int8, and this one is to "
            f"be {format_name(settings, dtype)}: leave it out, or use the --kv-cache-dtype it was made for."
        )
    is_quantised = k_format.is_quantised or v_format.is_quantised
    if settings.kv_refresh_interval is not None and not is_quantised:
        raise SettingsError(
            f"--kv-refresh-interval {settings.kv_refresh_interval} mends a quantised KV cache, and this one is to be "
            f"{format_name(settings, dtype)}: leave it out, or use --kv-cache-dtype int8."
        )
    window = model.effective_window(settings.max_model_len)
    if settings.kv_refresh_interval is not None and settings.kv_refresh_interval >= window:
        raise SettingsError(
            f"--kv-refresh-interval {settings.kv_refresh_interval} never comes, since no sequence generates more than "
            f"{window - 1} of its {window} tokens: lower it, or leave it out."
        )
    skipped = _skipped(settings, plain, is_quantised)
    if is_quantised and len(skipped) == len(plain):
        raise SettingsError(
            f"--kv-cache-dtype-skip-layers {' '.join(settings.kv_cache_dtype_skip_layers)} leaves none of the "
            f"{len(plain)} layers to be {format_name(settings, dtype)}."
        )
    chosen = []
    for number, layer in enumerate(plain):
        if number in skipped:
            chosen.append(layer)
            continue
        _check_head(settings, number, layer, k_format, v_format)
        other = None if v_format is k_format else v_format
        chosen.append(replace(layer, format=k_format, value_format=other, static=static))
    return tuple(chosen)


def kv_formats(settings: Settings, dtype: DType) -> tuple[KVFormat, KVFormat]:
    """(of K, of V) where a layer is not skipped."""

    def named(name: str, auto: KVFormat) -> KVFormat:
        return auto if name == "auto" else KVFormat("fp8_e4m3" if name == "fp8" else name)

    k_format = named(settings.kv_cache_dtype, PLAIN[dtype])
    return k_format, named(settings.kv_cache_dtype_v, k_format)


def _skipped(settings: Settings, layers: Sequence[LayerKV], is_quantised: bool) -> set[int]:
    """Numbers of the layers that keep the model's own format."""
    named = settings.kv_cache_dtype_skip_layers
    sliding = {number for number, layer in enumerate(layers) if layer.window is not None}
    if not named:
        return sliding if is_quantised and len(sliding) < len(layers) else set()
    numbers = {int(name) for name in named if name not in ("none", SLIDING_WINDOW)}
    if unknown := sorted(numbers - set(range(len(layers)))):
        raise SettingsError(
            f"--kv-cache-dtype-skip-layers {unknown[0]} is no layer of this model: it has layers 0 to "
            f"{len(layers) - 1}."
        )
    return numbers | (sliding if SLIDING_WINDOW in named else set())


def _check_head(settings: Settings, number: int, layer: LayerKV, k_format: KVFormat, v_format: KVFormat) -> None:
    if KVFormat.INT4 not in (k_format, v_format) or layer.head_dim % INT4_GROUP == 0:
        return
    name = "--kv-cache-dtype" if settings.kv_cache_dtype == "int4" else "--kv-cache-dtype-v"
    raise SettingsError(
        f"{name} int4 needs heads whose size is a multiple of {INT4_GROUP}, and those of layer {number} have "
        f"{layer.head_dim} numbers: use int8, or --kv-cache-dtype-skip-layers."
    )


# ------------------------------------------------------------------ in words
def format_name(settings: Settings, dtype: DType) -> str:
    """Of layers that are not skipped: 'bf16', 'int8', or 'int8/int4' for K and V that differ."""
    return pair_name(*kv_formats(settings, dtype))


def pair_name(k_format: KVFormat, v_format: KVFormat) -> str:
    return k_format.value if k_format is v_format else f"{k_format.value}/{v_format.value}"


def describe(settings: Settings, layout: KVLayout, dtype: DType) -> str:
    """The cache's formats, where their scales come from, and what they save, for people. layout: of `kv_layers`."""
    layers = [layer for group in layout.groups for layer in group.spec.layers]
    kinds: dict[tuple[tuple[KVFormat, KVFormat], bool], int] = {}
    for layer in layers:
        kind = (layer.formats, layer.static)
        kinds[kind] = kinds.get(kind, 0) + 1
    parts = []
    for ((k_format, v_format), static), count in sorted(kinds.items(), key=lambda item: item[0][0][0].bits):
        words = [_with_scales(format, static, settings) for format in (k_format, v_format)]
        part = words[0] if k_format is v_format else f"K {words[0]}, V {words[1]}"
        parts.append(part if len(kinds) == 1 else f"{part}: {count} of {len(layers)} layers")
    size, whole = layout.bytes_per_token, plain_bytes_per_token(layout, dtype)
    share = "" if size == whole else f", {100 * size / whole:.1f} % of what {PLAIN[dtype].value} takes"
    return f"{'; '.join(parts)}; {size} bytes a token{share}"


def plain_bytes_per_token(layout: KVLayout, dtype: DType) -> int:
    """What a token would take in the model's own format."""
    layers = (layer for group in layout.groups for layer in group.spec.layers)
    plain = (replace(layer, format=PLAIN[dtype], value_format=None, static=False) for layer in layers)
    return sum(layer.bytes_per_token() for layer in plain)


def _with_scales(format: KVFormat, static: bool, settings: Settings) -> str:
    if static and format.may_be_static:
        return f"{format.value} (scales of {settings.kv_cache_scales})"
    return f"{format.value} ({SCALES[format]})" if format in SCALES else format.value
