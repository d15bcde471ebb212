"""Scales found by reading a text: of the model's own K and V, of every family, wherever in the window they are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Loaded
from safetensors.torch import load_file, save_file
from tiny_models import FALLBACKS, VARIANTS, TinyModel, build, build_outlier

from configs.kv import KVFormat, LayerKV
from configs.settings import Settings
from engine import calibration
from engine.calibration import FLOOR, HEADROOM, Largest, calibrate, split
from engine.errors import StartupError
from engine.kv_scales import KVScales
from engine.model.interface import AttentionLayer, ForwardBatch
from engine.runner import observing
from engine.runner.fidelity import Trial
from engine.runner.kv_store import static_transforms
from engine.runner.solo import Solo
from engine.source import ModelSource
from engine.text.sample import SAMPLE
from engine.text.tokenizer import Tokenizer
from kernels.reference.kv_formats import LARGEST

CPU = torch.device("cpu")
IDS = list(SAMPLE.encode()[3000:3200])


def found_for(folder: Path, granularity: str = "channel", text: Path | None = None, **flags: object) -> KVScales:
    given = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_threads": 1, **flags}
    return calibrate(Settings.create(given), text, granularity, lambda phase, fraction: None)


def layers_of(scales: KVScales) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.from_numpy(k), torch.from_numpy(v)) for k, v in scales.layers]


def largest_of(loaded: Loaded, places: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """|K| and |V| of `IDS`, begun at `places` of the window."""
    solo = Solo(loaded.model, loaded.kv_layers, len(IDS), CPU)
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    inner = solo.attention.forward

    def noting(
        layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        seen.setdefault(layer.index, []).append((k.clone(), v.clone()))
        return inner(layer, q, k, v, batch)

    solo.attention.forward = noting
    for place in places:
        solo.hidden(IDS, place)
    both = (map(torch.cat, zip(*seen[layer], strict=True)) for layer in sorted(seen))
    return [tuple(x.abs().amax(dim=0) for x in halves) for halves in both]


@pytest.mark.parametrize("name", ["gqa", "gemma3", "phi3-long", "gpt2", "gpt_oss", "cohere2"])
def test_every_family(name: str, tmp_path: Path) -> None:
    """Ours and transformers', with windows and without: scales hold for another text, to within their headroom."""
    folder = build(tmp_path, (VARIANTS | FALLBACKS)[name])
    scales = found_for(folder)
    loaded = Loaded.load(folder, torch.float32, 512)
    assert scales.architecture == loaded.config.architecture and scales.num_tokens >= len(SAMPLE.encode())
    largest = largest_of(loaded, [0, 250])
    assert len(scales.layers) == len(largest) == len(loaded.kv_layers)
    for both, expected in zip(layers_of(scales), largest, strict=True):
        for scale, most in zip(both, expected, strict=True):
            assert scale.shape == most.shape and scale.dtype == torch.float32
            ratio = scale * LARGEST[KVFormat.INT8] / most
            assert 1.0 < ratio.median() < 2 * HEADROOM["channel"] and ratio.min() > 0.5, ratio


def test_granularity_and_formats(tmp_path: Path) -> None:
    build(tmp_path)
    channel, tensor = found_for(tmp_path), found_for(tmp_path, "tensor")
    assert (channel.granularity, channel.formats) == ("channel", (KVFormat.INT8, KVFormat.INT8))
    assert (tensor.granularity, len(channel.layers)) == ("tensor", 2)
    for some, whole in zip(layers_of(channel), layers_of(tensor), strict=True):
        for x, y in zip(some, whole, strict=True):
            assert len(x.unique()) > 1 and len(y.unique()) == 1
            torch.testing.assert_close(x.max() / HEADROOM["channel"], y.max())
    mixed = found_for(tmp_path, kv_cache_dtype="fp8", kv_cache_dtype_v="int8")
    assert mixed.formats == (KVFormat.FP8_E4M3, KVFormat.INT8)
    for (k, v), (k_int8, v_int8) in zip(layers_of(mixed), layers_of(channel), strict=True):
        torch.testing.assert_close(k * 448, k_int8 * 127)
        assert torch.equal(v, v_int8)


def test_a_scale_for_each_channel_leaves_the_others_their_bits(tmp_path: Path) -> None:
    """Where one channel is far larger, a single scale leaves the others next to nothing."""
    folder = build_outlier(tmp_path, 100)
    loaded = Loaded.load(folder, torch.float32, 512)
    trial = Trial(loaded.model, loaded.kv_layers, IDS, CPU, 512)
    layers = replace(loaded, kv={"kv_cache_dtype": "int8", "kv_cache_scales": "f"}).kv_layers
    divergence = {}
    for granularity in ("channel", "tensor"):
        transforms = static_transforms(found_for(folder, granularity), layers, CPU)
        divergence[granularity] = trial.measure(layers, transforms).divergence
    assert 4 * divergence["channel"] < divergence["tensor"], divergence


def test_slow_rotations_show_all_over_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of dims that has turned by 180 degrees after 4,000 tokens: half of it is small in the first ones."""
    theta = (4000 / torch.pi) ** 2  # of pair 1 of 2, frequency theta ** -0.5
    rope = {"rope_type": "default", "rope_theta": float(theta)}
    tiny = TinyModel(head_dim=4, num_kv_heads=1, max_position=8192, rope=rope, extra={"attention_bias": True})
    folder = build(tmp_path, tiny)
    weights = load_file(folder / "model.safetensors")
    for name, bias in weights.items():
        if name.endswith("k_proj.bias"):
            bias[:] = torch.tensor([0.0, 30.0, 0.0, 0.0])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    spread = found_for(folder).layers[0][0][0] * 127
    monkeypatch.setattr(observing, "GOLDEN_RATIO", 0.0)
    beginning = found_for(folder).layers[0][0][0] * 127
    assert spread[3] > 0.9 * spread[1] and beginning[3] < 0.6 * beginning[1]


def test_pieces_begin_as_texts_do(tmp_path: Path) -> None:
    class Begun(Tokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = False, **others: object) -> list[int]:
            return [7] * add_special_tokens + list(text.encode())

    tokenizer = Begun.load(ModelSource(build(tmp_path), "m", "test"))
    pieces = split(tokenizer, "x" * 1200, window=100_000)
    assert [len(piece) for piece in pieces] == [512, 512, 179] and {piece[0] for piece in pieces} == {7}
    assert max(map(len, split(tokenizer, "x" * 1200, window=64))) == 64
    assert sum(map(len, split(tokenizer, "x" * 10**6, 512))) <= calibration.MAX_TOKENS * 512 / 511 + 1


def test_texts(tmp_path: Path) -> None:
    folder, text = build(tmp_path / "model"), tmp_path / "text"
    text.write_text("é" * 200)
    assert found_for(folder, text=text).num_tokens == 400
    for content, words in ((b"short", "has 5 tokens, and 256 are needed"), (b"\xff" * 300, "is not UTF-8")):
        text.write_bytes(content)
        with pytest.raises(StartupError, match=f"^--text.*{words}"):
            found_for(folder, text=text)
    for path, words in (
        (tmp_path / "missing", "cannot be read: No such file"),
        (Path("/dev/zero"), "is not a regular"),
    ):
        with pytest.raises(StartupError, match=f"^--text {path} {words}"):
            found_for(folder, text=path)


def test_of_a_long_text_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, text = build(tmp_path / "model"), tmp_path / "text"
    text.write_text("a" * 400 + "\xff" * 100)
    monkeypatch.setattr(calibration, "MAX_CHARACTERS", 300)
    assert found_for(folder, text=text).num_tokens == 300


@pytest.mark.parametrize("format", ["int4", "bf16", "fp8_e5m2"])
def test_formats_without_such_scales(format: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"scales for fp8 and int8, .* to be {format}: use --kv-cache-dtype int8"):
        found_for(build(tmp_path), kv_cache_dtype=format)


@pytest.mark.parametrize("formats", [("fp8", "int4"), ("int4", "fp8"), ("fp8", "bf16")])
def test_a_half_without_such_scales_gets_those_of_the_others_format(formats: tuple[str, str], tmp_path: Path) -> None:
    """So the file serves whichever half is in that format."""
    folder = build(tmp_path, TinyModel(head_dim=32))
    alone = found_for(folder, kv_cache_dtype="fp8")
    beside = found_for(folder, kv_cache_dtype=formats[0], kv_cache_dtype_v=formats[1])
    assert beside.formats == alone.formats == (KVFormat.FP8_E4M3, KVFormat.FP8_E4M3)
    for both, expected in zip(beside.layers, alone.layers, strict=True):
        assert all(map(np.array_equal, both, expected))


def test_what_would_not_be_served_is_not_calibrated(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--kv-cache-dtype-v int4 needs heads whose size is a multiple of 32"):
        found_for(build(tmp_path), kv_cache_dtype="int8", kv_cache_dtype_v="int4")


def test_extremes_of_a_head() -> None:
    """Channels that the text left at 0 get a scale too; numbers that are not finite are no scales."""
    largest = Largest((LayerKV(2, 4, KVFormat.FP32),), CPU)
    layer = AttentionLayer(0, 1.0)
    k = torch.zeros(3, 2, 4)
    k[0, 0, 1], k[2, 0, 1], k[1, 1, 3] = 2.0, -8.0, 0.5
    largest.see(layer, k, k, -3 * k)
    [(k_scales, v_scales)] = largest.scales((KVFormat.INT8, KVFormat.FP8_E4M3), "channel")
    torch.testing.assert_close(k_scales[0] * 127 / 1.25, torch.tensor([8 * FLOOR, 8, 8 * FLOOR, 8 * FLOOR]))
    torch.testing.assert_close(v_scales[1] * 448 / 1.25, torch.tensor([1.5 * FLOOR, 1.5 * FLOOR, 1.5 * FLOOR, 1.5]))
    largest.see(layer, k, k * torch.nan, k)
    with pytest.raises(StartupError, match="not finite"):
        largest.scales((KVFormat.INT8, KVFormat.INT8), "channel")
