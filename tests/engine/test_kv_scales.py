"""Files of scales: written, read, and refused where they are of something else."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from configs.errors import StartupError
from configs.kv import KVFormat, LayerKV
from configs.settings import Settings
from configs.supported import read_model
from engine.kv_scales import KIND, KVScales, scales_of

INT8, FP8, INT4, BF16 = KVFormat.INT8, KVFormat.FP8_E4M3, KVFormat.INT4, KVFormat.BF16
LAYERS = (LayerKV(2, 8, INT8, static=True), LayerKV(1, 16, INT8, static=True))
METADATA = {"kind": KIND, "architecture": "Tiny", "k_format": "int8", "v_format": "int8", "granularity": "channel"}


def made_for(
    layers: tuple[LayerKV, ...] = LAYERS,
    formats: tuple[KVFormat, KVFormat] = (INT8, INT8),
    architecture: str = "Tiny",
) -> KVScales:
    generator = np.random.default_rng(1)

    def half(layer: LayerKV) -> np.ndarray:
        return generator.random((layer.kv_heads, layer.head_dim), np.float32) + np.float32(0.01)

    return KVScales(architecture, formats, "channel", 300, tuple((half(layer), half(layer)) for layer in layers))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scales.safetensors"


def refusal(scales: KVScales, layers: tuple[LayerKV, ...], architecture: str = "Tiny") -> str:
    with pytest.raises(StartupError) as caught:
        scales.check(Path("f"), architecture, layers)
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
    scales = made_for()
    scales.save(path)
    found = KVScales.load(path)
    for name in ("architecture", "formats", "granularity", "num_tokens"):
        assert getattr(found, name) == getattr(scales, name)
    for found_both, both in zip(found.layers, scales.layers, strict=True):
        for x, y in zip(found_both, both, strict=True):
            assert np.array_equal(x, y) and x.dtype == np.float32
    found.check(path, "Tiny", LAYERS)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_says_who_may_read_it(path: Path, umask: int, mode: int):
    before = os.umask(umask)
    try:
        made_for().save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


# ------------------------------------------------------------------ fitting
def test_only_halves_with_fixed_scales_need_their_format():
    made_for().check(Path("f"), "Tiny", (replace(LAYERS[0], value_format=INT4), LayerKV(1, 16, BF16)))
    made_for().check(Path("f"), "Tiny", (replace(LAYERS[0], format=BF16, value_format=INT8), LAYERS[1]))


def test_k_and_v_of_two_formats():
    layers = tuple(replace(layer, value_format=FP8) for layer in LAYERS)
    made_for(layers, (INT8, FP8)).check(Path("f"), "Tiny", layers)
    assert "is for fp8_e4m3, and K is kept in int8" in refusal(made_for(layers, (FP8, FP8)), layers)


def test_of_another_model():
    assert "(Tiny, and this one is Other)" in refusal(made_for(), LAYERS, "Other")
    assert "it has 2 layers, and this one has 1" in refusal(made_for(), LAYERS[:1])
    other = (LAYERS[0], LayerKV(2, 8, INT8, static=True))
    assert "layer 1 has 1 x 16 scales, and 2 heads of 8 numbers here" in refusal(made_for(), other)


def test_of_another_format():
    layers = tuple(replace(layer, format=FP8) for layer in LAYERS)
    assert "is for int8, and K is kept in fp8_e4m3" in refusal(made_for(), layers)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_numbers(value: float):
    scales = made_for()
    scales.layers[1][1][0, 3] = value
    assert "senseless scales in layer 1" in refusal(scales, LAYERS)


# ------------------------------------------------------------------ reading
def test_files_that_are_none(path: Path):
    assert unreadable(path).endswith("cannot be read: No such file or directory.")
    path.write_text("no")
    assert "cannot be read" in unreadable(path)
    save_file({"weight": np.ones(2)}, path)
    assert unreadable(path).endswith("holds no scales that octavo calibrate has written.")
    made_for().save(path)
    tensors = load_file(path)
    del tensors["layers.0.v"]
    save_file(tensors, path, {"kind": KIND})
    assert "holds no scales" in unreadable(path)
    made_for().save(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "cannot be read" in unreadable(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_not_waited_for(path: Path, make: Callable[[Path], None]):
    make(path)
    assert unreadable(path).endswith("is not a regular file.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_format": "int9"}, "k_format among its metadata is 'int9'"),
        ({"num_tokens": "x"}, "num_tokens among its metadata is 'x'"),
        ({}, "num_tokens among its metadata is missing"),
    ],
)
def test_metadata(path: Path, changes: dict[str, str], words: str):
    made_for().save(path)
    save_file(load_file(path), path, METADATA | changes)
    assert unreadable(path).endswith(f"holds no scales that octavo calibrate has written: {words}.")


def test_the_number_format(path: Path):
    halves = {f"layers.0.{half}": torch.ones(3, 64, dtype=torch.bfloat16) for half in "kv"}
    save_torch(halves, path, METADATA | {"num_tokens": "300"})
    assert "has layers.0.k in BF16, and scales are read in F32: run octavo calibrate again" in unreadable(path)


# ------------------------------------------------------------------ asked for by flags
def test_of_settings(tmp_path: Path, path: Path):
    model = read_model(tiny_models.build(tmp_path / "model"))
    layers = model.kv_layers(INT8)
    scales = made_for(layers, architecture=model.architecture)
    scales.save(path)
    found = scales_of(Settings(kv_cache_dtype="int8", kv_cache_scales=str(path)), model, "bfloat16")
    assert found is not None and np.array_equal(found.layers[1][0], scales.layers[1][0])
    with pytest.raises(StartupError, match="is for int8, and K is kept in fp8_e4m3"):
        scales_of(Settings(kv_cache_dtype="fp8", kv_cache_scales=str(path)), model, "bfloat16")
    assert scales_of(Settings(kv_cache_dtype="int8"), model, "bfloat16") is None


def test_octavo_plan_refuses_what_octavo_serve_does(tmp_path: Path, path: Path):
    """In the same words, and without torch."""
    folder = tiny_models.build(tmp_path / "model")
    flags = ["--gpu", "1GiB", "--kv-cache-dtype", "int8", "--kv-cache-scales", str(path)]
    code = (
        "import sys; from server.cli import main; code = main(); "
        "assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
    )

    def plan() -> tuple[int, str]:
        command = [sys.executable, "-c", code, "plan", str(folder), *flags]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
        return ended.returncode, ended.stderr

    assert plan() == (2, f"octavo: {unreadable(path)}\n")
    config = read_model(folder)
    made_for(config.kv_layers(INT8), architecture="Other").save(path)
    code_and_words = plan()
    assert code_and_words[0] == 2 and "is of another model (Other, and this one is Llama" in code_and_words[1]
    made_for(config.kv_layers(INT8), architecture=config.architecture).save(path)
    assert plan() == (0, "")
