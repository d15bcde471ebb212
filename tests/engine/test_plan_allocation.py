"""What the planner says from config.json alone, beside what an engine then allocates: within 1 %."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from smollm2 import smollm2_gguf
from torch import nn

from configs.kv import KVFormat
from configs.plan_options import Question
from configs.pool import Memory
from configs.settings import Settings
from engine.build import build_core
from engine.core.loop import EngineCore
from engine.device import Device
from engine.messages import Launch
from engine.source import find_config, sizes_of

TOLERANCE = 0.01
MODELS = {
    "mha": tiny_models.VARIANTS["mha"],
    "gqa": tiny_models.VARIANTS["gqa"],
    "tied": tiny_models.VARIANTS["tied"],
    "qwen2": tiny_models.VARIANTS["qwen2"],
    "phi3": tiny_models.VARIANTS["phi3"],
    "gemma3": tiny_models.VARIANTS["gemma3"],
    "gpt_neox": tiny_models.FALLBACKS["gpt_neox"],
}
"""Every layout of weights: biases, fused, tied, norms in fp32, windows, and a class of transformers."""


def start(path: Path, settings: Settings) -> EngineCore:
    launch = Launch(str(path), "model", settings.model_dump(mode="json"), (), fit_token_ids=list(range(200)))
    core, _ = build_core(launch, lambda loading: None)
    return core


def allocated(core: EngineCore) -> tuple[int, int]:
    """Bytes of the weights with their tables and of what keys are fitted by, and of the pools, counted on the tensors
    themselves."""
    runner = core._executor.runner  # type: ignore[attr-defined]
    fits = [pages.transforms for pages in runner.attention.store.pages]
    found = {(t.data_ptr(), t.nbytes): t.nbytes for t in tensors([runner.model, fits], set())}
    return sum(found.values()), sum(pool.nbytes for pool in runner.pools)


def tensors(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All that a model holds on to."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing.to_dense() if thing.is_mkldnn else thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors(value, seen)
    elif isinstance(thing, nn.Module) or type(thing).__module__.startswith(("kernels.", "engine.")):
        yield from tensors(vars(thing), seen)


def compare(path: Path, **given: Any) -> None:
    """`path`: of the model, whose weights the planner does not read. The scratch of refreshes is compared too."""
    settings = Settings(model=str(path), max_num_seqs=4, **given)
    device = Device.find(settings)
    model = sizes_of(find_config(settings), trust_remote_code=False)
    question = Question(settings.model_copy(update={"dtype": device.dtype_name}), model, Memory(2**40, is_gpu=False))
    pool, refusal = question.sized
    assert pool is not None, refusal
    core = start(path, settings)
    weights, pools = allocated(core)
    scratch = core._executor.runner.refresh  # type: ignore[attr-defined]
    assert question.costs.refresh_bytes == (0 if scratch is None else scratch.pool.nbytes)
    assert question.costs.weight_bytes == pytest.approx(weights, rel=TOLERANCE)
    assert pool.pool_bytes == pytest.approx(pools, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in MODELS), ("gqa", "auto"), ("gemma3", "auto")]
)
def test_tiny_models(name: str, dtype: str, tmp_path: Path) -> None:
    """Their vocabulary is a multiple of the 32 rows that packed weights are filled up to, as real ones nearly are."""
    folder = tiny_models.build(tmp_path, replace(MODELS[name], vocab_size=288))
    compare(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in tiny_models.FALLBACKS])
def test_int8_weights(name: str, dtype: str, tmp_path: Path) -> None:
    """Scales are filled up to 32 outputs as the weights are, so sizes are multiples of 32 here."""
    folder = tiny_models.build(tmp_path, replace(MODELS[name], vocab_size=288))
    compare(folder, dtype=dtype, quantization="int8")


@pytest.mark.parametrize("form", KVFormat)
def test_formats(form: KVFormat, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, replace(MODELS["gqa"], vocab_size=288, head_dim=32))
    compare(folder, dtype="float32", kv_cache_dtype=form.value, kv_cache_memory_bytes="8MiB")


def test_windows_and_a_stated_size(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, replace(MODELS["gemma3"], vocab_size=288))
    compare(folder, dtype="float32", kv_cache_memory_bytes="3MiB", max_num_batched_tokens=64, block_size=4)


@pytest.mark.parametrize("name", ["gqa", "gemma3"])
def test_refreshes(name: str, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, replace(MODELS[name], vocab_size=288))
    compare(folder, dtype="float32", kv_cache_dtype="int8", kv_cache_memory_bytes="8MiB", kv_refresh_interval=32)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_1, Kind.F16], ids=str)
def test_codes_of_a_gguf_file(kind: Kind, tmp_path: Path) -> None:
    """They are kept on a CPU, unless they are not wanted."""
    folder = tiny_models.build(tmp_path / "hf", replace(MODELS["tied"], vocab_size=288))
    path = write_gguf(tmp_path / "m.gguf", folder, kind)
    compare(path, dtype="float32")
    compare(path, dtype="float32", quantization="none")


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_smollm2(quantization: str) -> None:
    compare(smollm2_gguf(), kv_cache_memory_bytes="64MiB", quantization=quantization)
