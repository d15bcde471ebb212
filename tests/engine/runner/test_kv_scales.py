"""Files of scales: written, read, and refused where they are of something else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.kv import KVFormat, LayerKV
from engine.errors import StartupError
from engine.runner.kv_scales import KIND, KVScales
from engine.runner.kv_store import UNSHAPED
from kernels.ops import NO_SHAPING

CPU = torch.device("cpu")
INT8, FP8, INT4, BF16 = KVFormat.INT8, KVFormat.FP8_E4M3, KVFormat.INT4, KVFormat.BF16
LAYERS = (LayerKV(2, 8, INT8, static=True), LayerKV(1, 16, INT8, static=True))


def scales_of(layers: tuple[LayerKV, ...] = LAYERS, formats: tuple[KVFormat, KVFormat] = (INT8, INT8)) -> KVScales:
    generator = torch.Generator().manual_seed(1)

    def half(layer: LayerKV) -> torch.Tensor:
        return torch.rand(layer.kv_heads, layer.head_dim, generator=generator) + 0.01

    return KVScales("Tiny", formats, "channel", 300, tuple((half(layer), half(layer)) for layer in layers))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scales.safetensors"


def refusal(scales: KVScales, layers: tuple[LayerKV, ...], architecture: str = "Tiny") -> str:
    with pytest.raises(StartupError) as caught:
        scales.shapings(Path("f"), architecture, layers, CPU)
    message = str(caught.value)
    assert message.startswith("--kv-cache-scales f ") and message.endswith(".") and "octavo calibrate" in message
    return message


def unreadable(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        KVScales.load(path)
    message = str(caught.value)
    assert message.startswith(f"--kv-cache-scales {path} ") and message.endswith(".") and "\n" not in message
    return message


def test_round_trip(path: Path):
    scales = scales_of()
    scales.save(path)
    found = KVScales.load(path)
    assert (found.architecture, found.formats, found.granularity, found.num_tokens) == (
        "Tiny",
        (INT8, INT8),
        "channel",
        300,
    )
    for found_both, both in zip(found.shapings(path, "Tiny", LAYERS, CPU), scales.layers, strict=True):
        for shaping, y in zip(found_both, both, strict=True):
            x = shaping.channels
            assert x is not None and torch.equal(x, y) and x.dtype == torch.float32 and x.is_contiguous()
            assert shaping.centre is shaping.feedback is None


def test_only_halves_with_fixed_scales_get_them():
    scales = scales_of()
    layers = (replace(LAYERS[0], value_format=INT4), LayerKV(1, 16, BF16))
    (k, v), skipped = scales.shapings(Path("f"), "Tiny", layers, CPU)
    assert torch.equal(k.channels, scales.layers[0][0]) and v is NO_SHAPING and skipped == UNSHAPED
    layers = (replace(LAYERS[0], format=BF16, value_format=INT8), LAYERS[1])
    (k, v), _ = scales.shapings(Path("f"), "Tiny", layers, CPU)
    assert k is NO_SHAPING and torch.equal(v.channels, scales.layers[0][1])


def test_k_and_v_of_two_formats():
    layers = tuple(replace(layer, value_format=FP8) for layer in LAYERS)
    assert scales_of(layers, (INT8, FP8)).shapings(Path("f"), "Tiny", layers, CPU)
    assert "is for fp8_e4m3, and K is kept in int8" in refusal(scales_of(layers, (FP8, FP8)), layers)


def test_of_another_model():
    assert "(Tiny, and this one is Other)" in refusal(scales_of(), LAYERS, "Other")
    assert "it has 2 layers, and this one has 1" in refusal(scales_of(), LAYERS[:1])
    other = (LAYERS[0], LayerKV(2, 8, INT8, static=True))
    assert "layer 1 has 1 x 16 scales, and 2 heads of 8 numbers here" in refusal(scales_of(), other)


def test_of_another_format():
    layers = tuple(replace(layer, format=FP8) for layer in LAYERS)
    assert "is for int8, and K is kept in fp8_e4m3" in refusal(scales_of(), layers)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_numbers(value: float):
    scales = scales_of()
    scales.layers[1][1][0, 3] = value
    assert "senseless scales in layer 1" in refusal(scales, LAYERS)


def test_files_that_are_none(path: Path):
    assert "cannot be read: No such file" in unreadable(path)
    path.write_text("no")
    assert "cannot be read" in unreadable(path)
    save_file({"weight": torch.ones(2)}, path)
    assert "holds no scales" in unreadable(path)
    scales_of().save(path)
    tensors = load_file(path)
    del tensors["layers.0.v"]
    save_file(tensors, path, {"kind": KIND})
    assert "holds no scales" in unreadable(path)
    scales_of().save(path)
    save_file(load_file(path), path, {"kind": KIND, "architecture": "Tiny", "k_format": "int9"})
    assert "cannot be read" in unreadable(path)


def test_a_place_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(StartupError, match=r"^--out .* cannot be written"):
        scales_of().save(tmp_path / "nowhere" / "scales")
