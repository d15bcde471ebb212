"""Formats that give nonsense with a model are refused at start, with what to take instead (A30)."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from smollm2 import smollm2, smollm2_gguf
from tiny_models import TinyModel, build, build_outlier

from configs.kv import LayerKV
from configs.kv_flags import PLAIN, kv_layers
from configs.settings import Settings
from engine import LLM, SamplingParams
from engine.cache_setup import prepare_cache
from engine.calibration import calibrate
from engine.device import Device
from engine.errors import StartupError
from engine.kv_scales import KVScales
from engine.model.registry import load_model, read_config
from engine.runner.fidelity import Fidelity, Trial
from engine.runner.key_fit import KeyFit
from engine.runner.kv_store import UNTRANSFORMED, KVTransforms, static_transforms
from engine.runner.solo import Solo
from engine.source import ModelSource
from engine.text.sample import FIT_TOKENS, SAMPLE, TRIED_TOKENS
from engine.text.tokenizer import Tokenizer

IDS = list(SAMPLE.encode()[: TRIED_TOKENS + FIT_TOKENS])
TEXTS = IDS[:TRIED_TOKENS], IDS[TRIED_TOKENS:]
SMALL = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 32, "max_num_seqs": 4, "num_threads": 1}


def trial(folder: Path, **flags: object) -> Fidelity | None:
    settings = Settings.create({**SMALL, **flags})
    config = read_config(folder, trust_remote_code=False)
    model = load_model(folder, config, torch.float32, 512, lambda fraction: None)
    return prepare_cache(settings, config, model, Device.find(settings), TEXTS, 512, None)[1]


def refusal(folder: Path, **flags: object) -> str:
    with pytest.raises(StartupError) as caught:
        trial(folder, **flags)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_the_models_own_format_is_not_tried(tmp_path: Path) -> None:
    assert trial(build(tmp_path)) is trial(tmp_path, kv_cache_dtype="fp32") is None


def test_the_measure_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path)
    assert "nats from the plain cache's answers" in str(trial(tmp_path, kv_cache_dtype="int8"))
    assert not caplog.records
    trial(build_outlier(tmp_path / "outlier", 100), kv_cache_dtype="fp8_e5m2")
    [record] = caplog.records
    assert record.levelname == "WARNING"
    said, better = record.getMessage().split(" Nearer: ")
    assert said.startswith("--kv-cache-dtype fp8_e5m2 changes this model's answers: 0.")
    assert re.match(r"--kv-cache-dtype int8: \d\S* nats from .* of 256\.$", better)


def test_a_warning_names_nothing_where_nothing_is_nearer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cache_setup.NOTICEABLE", 0.0)
    trial(build(tmp_path), kv_cache_dtype="fp8_e4m3")
    [record] = caplog.records
    assert record.getMessage().endswith(" of 256.") and "Nearer" not in record.getMessage()


def unfitted(fit: KeyFit, layers: Sequence[LayerKV]) -> list[KVTransforms]:
    return [UNTRANSFORMED] * len(layers)


def test_a30_fitted_keys_bear_any_channel_that_is_large_at_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_outlier(tmp_path, 1000)
    assert trial(tmp_path, kv_cache_dtype="int4")
    monkeypatch.setattr(KeyFit, "transforms", unfitted)
    assert refusal(tmp_path, kv_cache_dtype="int4").startswith("--kv-cache-dtype int4 gives nonsense with this model")


def test_a30_rotation_saves_keys_with_an_outlier_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_outlier(tmp_path, 100)
    monkeypatch.setattr(KeyFit, "transforms", unfitted)
    assert trial(tmp_path, kv_cache_dtype="int4")
    monkeypatch.setattr(LayerKV, "is_rotated", lambda layer, format: False)
    assert refusal(tmp_path, kv_cache_dtype="int4").startswith("--kv-cache-dtype int4 gives nonsense with this model")


def test_a30_nonsense_is_refused_and_what_is_advised_works(tmp_path: Path) -> None:
    build_outlier(tmp_path, 1e5)
    message = refusal(tmp_path, kv_cache_dtype="fp8_e5m2")
    assert "of 256 (at most 0.25 nats are taken). Use --kv-cache-dtype int8: 0.0" in message
    assert trial(tmp_path, kv_cache_dtype="int8")
    message = refusal(tmp_path, kv_cache_dtype="fp8_e5m2", kv_cache_dtype_v="int4")
    assert message.startswith("--kv-cache-dtype fp8_e5m2 --kv-cache-dtype-v int4 gives nonsense with this model")
    assert "Use --kv-cache-dtype int8 --kv-cache-dtype-v int4: 0.0" in message
    assert trial(tmp_path, kv_cache_dtype="int8", kv_cache_dtype_v="int4")


def test_a30_where_nothing_smaller_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_outlier(tmp_path, 300)
    for module in ("engine.runner.fidelity", "engine.cache_setup"):
        monkeypatch.setattr(f"{module}.MAX_DIVERGENCE", 0.0)
    assert refusal(tmp_path, kv_cache_dtype="int4").endswith("Use --kv-cache-dtype auto.")


def test_the_engine_does_not_start(tmp_path: Path) -> None:
    build_outlier(tmp_path, 1e5)
    with pytest.raises(StartupError, match="gives nonsense with this model"):
        LLM(str(tmp_path), kv_cache_dtype="fp8_e5m2", **SMALL)
    with LLM(str(tmp_path), kv_cache_dtype="int8", kv_cache_dtype_v="int4", **SMALL) as llm:
        assert llm.info.cache.dtype == "int8/int4"
        assert llm.info.cache.bytes_per_token == 2 * (64 + 2 + 32 + 8)
        assert llm.info.cache.plain_bytes_per_token == 2 * (64 + 64) * 4
        assert llm.info.summary["KV format"].startswith("K int8 (a scale")
        cache, said = llm.info.cache, llm.info.summary["KV fidelity"]
        assert cache.divergence is not None and said.startswith(f"{cache.divergence:.2g} nats")
        assert cache.agreement is not None and f"{100 * cache.agreement:.0f} % of 256" in said
        assert (cache.fitted_layers, cache.scales, cache.refresh_interval) == (2, None, None)
        [result] = llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(result.outputs[0].token_ids) == 3


def test_the_text_that_keys_are_fitted_to_is_not_the_one_they_are_tried_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    read: list[list[int]] = []
    hidden = Solo.hidden

    def noting(solo: Solo, token_ids: list[int], *rest: object, **named: object) -> torch.Tensor:
        read.append(list(token_ids))
        return hidden(solo, token_ids, *rest, **named)

    monkeypatch.setattr(Solo, "hidden", noting)
    trial(tmp_path, kv_cache_dtype="int8")
    *pieces, plain, tried = read
    assert [token for piece in pieces for token in piece] == IDS[TRIED_TOKENS:] and plain == tried == IDS[:TRIED_TOKENS]


def test_layers_with_static_scales_for_values_alone_have_fitted_keys(tmp_path: Path) -> None:
    build(tmp_path, TinyModel(head_dim=32))
    scales = tmp_path / "scales"
    flags = {**SMALL, "kv_cache_dtype": "int4", "kv_cache_dtype_v": "int8"}
    calibrate(Settings.create({**SMALL, "model": str(tmp_path), "kv_cache_dtype": "int8"}), None, "channel",
              lambda *done: None).save(scales)  # fmt: skip
    settings = Settings.create({**flags, "kv_cache_scales": str(scales)})
    config = read_config(tmp_path, trust_remote_code=False)
    model = load_model(tmp_path, config, torch.float32, 512, lambda fraction: None)
    layers = kv_layers(settings, config, "float32")
    static = static_transforms(KVScales.load(scales), layers, torch.device("cpu"))
    transforms, _ = prepare_cache(settings, config, model, Device.find(settings), TEXTS, 512, static)
    assert transforms is not None
    for (k, v), (_, static_v) in zip(transforms, static, strict=True):
        assert k.feedback is not None and v is static_v and v.channels is not None


def test_where_there_is_no_text_nothing_is_fitted_and_nothing_tried(tmp_path: Path) -> None:
    build(tmp_path)
    settings = Settings.create({**SMALL, "kv_cache_dtype": "int8"})
    config = read_config(tmp_path, trust_remote_code=False)
    model = load_model(tmp_path, config, torch.float32, 512, lambda fraction: None)
    assert prepare_cache(settings, config, model, Device.find(settings), ([], []), 512, None) == (
        [UNTRANSFORMED] * 2,
        None,
    )


def test_a29_formats_of_the_default_model() -> None:
    """SmolLM2, by the bits: twice what was measured is the bound; e4m3 is nearer than e5m2."""
    settings = Settings.create({"device": "cpu"})
    device = Device.find(settings)
    loaded = smollm2(device.dtype)
    config, model = loaded.config, loaded.model
    ids = Tokenizer.load(ModelSource(smollm2_gguf(), "smollm2", "test")).encode(SAMPLE, add_special_tokens=True)
    plain = config.kv_layers(PLAIN[device.dtype_name])
    fit = KeyFit.of(model, plain, ids[TRIED_TOKENS : TRIED_TOKENS + FIT_TOKENS], 8192, device.place)
    trial_of = Trial(model, plain, ids[:TRIED_TOKENS], device.place, 512)
    bounds = {("fp8", "auto"): 0.012, ("fp8_e5m2", "auto"): 0.054, ("int8", "auto"): 0.004, ("int8", "int4"): 0.012}
    bounds[("int4", "auto")] = 0.07
    found = {}
    for (k_name, v_name), bound in bounds.items():
        other = settings.model_copy(update={"kv_cache_dtype": k_name, "kv_cache_dtype_v": v_name})
        layers = kv_layers(other, config, device.dtype_name)
        found[k_name, v_name] = trial_of.measure(layers, fit.transforms(layers)).divergence
        assert 0 < found[k_name, v_name] < bound, found
    assert found["fp8", "auto"] < found["fp8_e5m2", "auto"]


def test_scales_of_another_model_with_the_same_shapes_are_refused(tmp_path: Path) -> None:
    """They pass every look at the file."""
    scales = tmp_path / "scales"
    own, other = build(tmp_path / "own", TinyModel()), build(tmp_path / "other", TinyModel(scale=0.4))
    calibrate(Settings.create({**SMALL, "model": str(own)}), None, "channel", lambda *done: None).save(scales)
    flags = {**SMALL, "kv_cache_dtype": "int8", "kv_cache_scales": str(scales)}
    with LLM(str(own), kv_refresh_interval=32, **flags) as llm:
        assert llm.info.summary["KV format"].startswith(f"int8 (scales of {scales})")
        cache = llm.info.cache
        assert (cache.fitted_layers, cache.scales, cache.refresh_interval) == (0, str(scales), 32)
    with pytest.raises(StartupError) as caught:
        LLM(str(other), **flags)
    assert f"--kv-cache-scales {scales} gives nonsense" in str(caught.value)
    assert "Use --kv-cache-dtype int8, without --kv-cache-scales: 0." in str(caught.value)
