"""Which format each layer's K and V get from the flags, and which flags are refused."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.kv import KVFormat, KVLayout, LayerKV
from configs.kv_flags import describe, format_name, kv_layers
from configs.load import load
from configs.model import GenerationDefaults, SizedConfig
from configs.settings import Settings

BF16, FP32, FP16, INT8, INT4 = KVFormat.BF16, KVFormat.FP32, KVFormat.FP16, KVFormat.INT8, KVFormat.INT4


@dataclass(frozen=True)
class Sizes(SizedConfig):
    """Nothing but layers."""

    windows: tuple[int | None, ...]
    head_dim: int

    window = max_window = num_parameters = 4096

    def weight_bytes(self, dtype: str) -> int:
        return 0

    def kv_layers(self, format: KVFormat) -> tuple[LayerKV, ...]:
        return tuple(LayerKV(2, self.head_dim, format, window) for window in self.windows)


def model(*windows: int | None, head_dim: int = 64) -> Sizes:
    return Sizes("Sizes", 1000, None, GenerationDefaults(), windows or (None,) * 4, head_dim)


def layers(*windows: int | None, dtype: str = "bfloat16", head_dim: int = 64, **flags: object) -> tuple[LayerKV, ...]:
    return kv_layers(Settings.create(flags), model(*windows, head_dim=head_dim), dtype)


def formats(*windows: int | None, **flags: object) -> list[tuple[KVFormat, KVFormat]]:
    return [layer.formats for layer in layers(*windows, **flags)]


def refusal(*windows: int | None, **flags: object) -> str:
    with pytest.raises(SettingsError) as caught:
        layers(*windows, **flags)
    message = str(caught.value)
    assert message.startswith("--") and message.endswith(".") and "\n" not in message
    return message


# ------------------------------------------------------------------ formats
@pytest.mark.parametrize(
    ("dtype", "format"), [("bfloat16", BF16), ("float16", KVFormat.FP16), ("float32", KVFormat.FP32)]
)
def test_without_a_flag_the_models_own(dtype: str, format: KVFormat):
    assert layers(None, 512, dtype=dtype) == (LayerKV(2, 64, format), LayerKV(2, 64, format, 512))


@pytest.mark.parametrize(
    ("word", "format"),
    [
        ("bf16", BF16),
        ("bfloat16", BF16),
        ("fp16", FP16),
        ("float16", FP16),
        ("half", FP16),
        ("fp32", FP32),
        ("float32", FP32),
        ("float", FP32),
        ("fp8", KVFormat.FP8_E4M3),
        ("fp8_e4m3", KVFormat.FP8_E4M3),
        ("FP8_E5M2", KVFormat.FP8_E5M2),
        ("int8", INT8),
        ("int4", INT4),
    ],
)
def test_words(word: str, format: KVFormat):
    for dtype in ("bfloat16", "float32"):
        assert layers(dtype=dtype, kv_cache_dtype=word) == (LayerKV(2, 64, format),) * 4


def test_v_may_differ():
    assert formats(None, kv_cache_dtype="int8", kv_cache_dtype_v="int4") == [(INT8, INT4)]
    assert formats(None, kv_cache_dtype_v="int4") == [(BF16, INT4)]
    assert formats(None, kv_cache_dtype="int4", kv_cache_dtype_v="bf16") == [(INT4, BF16)]
    assert layers(None, kv_cache_dtype="int8", kv_cache_dtype_v="int8") == (LayerKV(2, 64, INT8),)


def test_layers_with_a_window_are_skipped_where_the_format_is_quantised():
    quantised, plain = (INT8, INT8), (BF16, BF16)
    assert formats(9, None, 9, kv_cache_dtype="int8") == [plain, quantised, plain]
    assert formats(9, None, kv_cache_dtype_v="int8") == [plain, (BF16, INT8)]
    assert formats(9, None, kv_cache_dtype="fp32") == [(FP32, FP32)] * 2


def test_unless_all_layers_have_one():
    assert formats(9, 9, kv_cache_dtype="int8") == [(INT8, INT8)] * 2


def test_layers_are_skipped_as_told():
    quantised, plain = (INT8, INT8), (BF16, BF16)
    skip = {"kv_cache_dtype": "int8"}
    assert formats(9, None, kv_cache_dtype_skip_layers="none", **skip) == [quantised] * 2
    assert formats(9, None, kv_cache_dtype_skip_layers="auto", **skip) == [plain, quantised]
    assert formats(9, None, None, kv_cache_dtype_skip_layers=[1], **skip) == [quantised, plain, quantised]
    assert formats(9, None, None, kv_cache_dtype_skip_layers=["sliding_window", "2"], **skip) == [
        plain,
        quantised,
        plain,
    ]
    assert formats(None, None, kv_cache_dtype="fp32", kv_cache_dtype_skip_layers="1") == [(FP32, FP32), plain]


def test_the_command_line_and_variables():
    argv = [
        "m",
        "--kv-cache-dtype",
        "fp8",
        "--kv-cache-dtype-v=int4",
        "--kv-cache-dtype-skip-layers",
        "0",
        "sliding_window",
    ]
    settings = load(argv, {}).settings
    chosen = kv_layers(settings, model(None, 8, None), "float32")
    assert [layer.formats for layer in chosen] == [(FP32, FP32)] * 2 + [(KVFormat.FP8_E4M3, INT4)]
    variables = {"OCTAVO_KV_CACHE_DTYPE": "int8", "OCTAVO_KV_CACHE_DTYPE_SKIP_LAYERS": "none"}
    assert kv_layers(load([], variables).settings, model(8), "float32") == (LayerKV(2, 64, INT8, 8),)


@pytest.mark.parametrize("words", ["none", "auto", "0 sliding_window"])
def test_print_config_can_be_read_again(words: str):
    flags = ["--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", *words.split()]
    loaded = load(["m", *flags], {})
    [line] = [line for line in loaded.describe().splitlines() if line.startswith("kv-cache-dtype-skip-layers")]
    value = {"none": '["none"]', "auto": '"auto"', "0 sliding_window": '["0", "sliding_window"]'}[words]
    assert line.startswith(f"kv-cache-dtype-skip-layers: {value}  # --kv-cache-dtype-skip-layers")
    assert Settings(**loaded.settings.model_dump(mode="json")) == loaded.settings


# ------------------------------------------------------------------ scales
def test_scales_from_a_file_take_the_place_of_a_tokens_own():
    assert layers(None, kv_cache_dtype="int8", kv_cache_scales="f") == (LayerKV(2, 64, INT8, static=True),)
    mixed = layers(None, 9, kv_cache_dtype="int4", kv_cache_dtype_v="fp8", kv_cache_scales="f")
    assert mixed == (LayerKV(2, 64, INT4, None, KVFormat.FP8_E4M3, static=True), LayerKV(2, 64, BF16, 9))


@pytest.mark.parametrize("name", ["auto", "fp32", "fp8_e5m2", "int4"])
def test_other_formats_have_no_such_scales(name: str):
    message = refusal(kv_cache_dtype=name, kv_cache_scales="scales.safetensors")
    assert "--kv-cache-scales scales.safetensors" in message and name.replace("auto", "bf16") in message


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize("head_dim", [16, 80])
def test_int4_needs_whole_groups(head_dim: int):
    message = refusal(head_dim=head_dim, kv_cache_dtype="int4")
    assert message.startswith("--kv-cache-dtype int4") and "layer 0" in message and f"{head_dim} numbers" in message
    assert refusal(head_dim=head_dim, kv_cache_dtype_v="int4").startswith("--kv-cache-dtype-v int4")
    assert layers(head_dim=head_dim, kv_cache_dtype="int8")


def test_int4_in_the_layers_that_are_not_skipped():
    assert layers(9, None, head_dim=96, kv_cache_dtype="int4")
    assert "layer 1" in refusal(9, None, head_dim=48, kv_cache_dtype="int4")


@pytest.mark.parametrize("number", [4, 99])
def test_a_layer_that_is_not_there(number: int):
    message = refusal(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["0", str(number)])
    assert message.startswith(f"--kv-cache-dtype-skip-layers {number}") and "0 to 3" in message


def test_no_layer_left():
    message = refusal(9, 9, kv_cache_dtype="int8", kv_cache_dtype_skip_layers="sliding_window")
    assert "--kv-cache-dtype-skip-layers sliding_window" in message and "to be int8" in message
    assert "2 layers" in refusal(None, None, kv_cache_dtype_v="int4", kv_cache_dtype_skip_layers=[0, 1])


def test_nothing_to_refresh():
    assert refusal(kv_refresh_interval=64).startswith("--kv-refresh-interval 64")
    assert "fp32" in refusal(kv_refresh_interval=64, kv_cache_dtype="fp32")
    assert layers(kv_refresh_interval=64, kv_cache_dtype_v="fp8")


@pytest.mark.parametrize(("interval", "flags"), [(4096, {}), (99_999_999_999, {}), (512, {"max_model_len": 512})])
def test_a_refresh_that_never_comes(interval: int, flags: dict[str, int]):
    message = refusal(kv_refresh_interval=interval, kv_cache_dtype="int8", **flags)
    window = flags.get("max_model_len", 4096)
    assert message.startswith(f"--kv-refresh-interval {interval} never comes") and f"{window - 1} of its" in message
    assert layers(kv_refresh_interval=window - 1, kv_cache_dtype="int8", **flags)


# ------------------------------------------------------------------ words
def test_names():
    def name(**flags: object) -> str:
        return format_name(Settings.create(flags), "bfloat16")

    assert (name(), name(kv_cache_dtype="fp8"), name(kv_cache_dtype_v="int4")) == ("bf16", "fp8_e4m3", "bf16/int4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "bf16; 1536 bytes a token"),
        ({"kv_cache_dtype": "fp32"}, "fp32; 3072 bytes a token, 200.0 % of what bf16 takes"),
        (
            {"kv_cache_dtype": "int8"},
            "int8 (a scale for each token and head): 2 of 3 layers; bf16: 1 of 3 layers; 1040 bytes a token, "
            "67.7 % of what bf16 takes",
        ),
        (
            {"kv_cache_dtype": "int8", "kv_cache_dtype_v": "int4", "kv_cache_dtype_skip_layers": "none"},
            "K int8 (a scale for each token and head), V int4 (a scale and a zero point for each "
            "token and 32 numbers); 636 bytes a token, 41.4 % of what bf16 takes",
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_scales": "s.safetensors", "kv_cache_dtype_skip_layers": "none"},
            "fp8_e4m3 (scales of s.safetensors); 768 bytes a token, 50.0 % of what bf16 takes",
        ),
        (
            {"kv_cache_dtype": "fp8_e5m2", "kv_cache_dtype_skip_layers": "none"},
            "fp8_e5m2 (no scales); 768 bytes a token, 50.0 % of what bf16 takes",
        ),
    ],
)
def test_a29_formats_and_where_scales_come_from_are_said(flags: dict[str, str], words: str):
    settings = Settings.create(flags)
    layout = KVLayout.of(kv_layers(settings, model(None, 9, None), "bfloat16"), 16)
    assert describe(settings, layout, "bfloat16") == words


def test_the_documented_bytes_are_these():
    """Of one token in one head: K alone."""
    text = (Path(__file__).parents[2] / "docs/kv-quantisation.md").read_text()
    table = text.split("| format | a number is stored as |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == 6
    for names, _, _, rotated, *figures in rows:
        static = "--kv-cache-scales" in names
        for name in re.findall(r"`(\w+)`", names):
            format = KVFormat(name)
            sizes = [LayerKV(1, size, format, static=static).bytes_per_token() // 2 for size in (64, 128)]
            assert figures == [*map(str, sizes), f"{sizes[0] / 128:.3f}"], names
            assert (rotated == "yes") == LayerKV(1, 64, format, static=static).is_rotated(format)
