"""--batch-invariant: what it chooses, and where it is refused."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from engines import Loaded
from flash_library import on_a_gpu
from tiny_models import FALLBACKS

from configs.settings import Settings
from engine import build, invariance
from engine.device import GPU, Device, NoGPU
from engine.errors import StartupError
from engine.invariance import check_invariance, linear_backend
from engine.model.layers.linear import Linear
from engine.model.registry import load_model, read_config
from kernels import ops, reference
from kernels.reference.linear import TorchLinear
from kernels.registry import AUTO, INVARIANT, choose
from kernels.triton import offers

FLAG = Settings(batch_invariant=True)
CPU = Device.find(Settings(dtype="float32"), lambda: NoGPU("there is none", torch_could=False))
H200 = Device.find(Settings(), lambda: GPU("NVIDIA H200", (9, 0), 2**37, 2**37, has_bfloat16=True))


@pytest.fixture
def triton_serves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on an H200 with a Triton on which all goes well."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setattr(offers, "refusal", lambda: None)
    with on_a_gpu(monkeypatch):
        yield


def refusal(settings: Settings, config=None, device: Device = H200) -> str:
    with pytest.raises(StartupError) as caught:
        check_invariance(settings, device, config)
    return str(caught.value)


def test_it_is_asked_for_on_a_gpu_only() -> None:
    assert linear_backend(FLAG, H200) == INVARIANT
    assert linear_backend(FLAG, CPU) == linear_backend(Settings(), H200) == AUTO
    check_invariance(FLAG, CPU)
    check_invariance(Settings(attention_backend="flash-attn"), H200)


def test_triton_serves_linear_layers_on_request_only(triton_serves: None) -> None:
    where = "cuda", torch.bfloat16
    usual, asked = choose("pack_linear", *where), choose("pack_linear", *where, None, INVARIANT)
    assert (usual.name, asked.name) == (reference.NAME, offers.NAME)
    assert ("Triton", "on request only (--batch-invariant)") in usual.better
    assert {reason for _, reason in asked.refused} == {"--batch-invariant"}
    assert choose("pack_coded_linear", *where).name == offers.NAME


@pytest.mark.parametrize("name", ["gqa", "gemma3"])
@pytest.mark.parametrize("format", ["auto", "int8"])
def test_where_triton_serves_everything_it_is_possible(
    name: str, format: str, tmp_path: Path, triton_serves: None
) -> None:
    config = read_config(tiny_models.build(tmp_path, tiny_models.VARIANTS[name]), trust_remote_code=False)
    settings = FLAG.model_copy(update={"kv_cache_dtype": format, "num_gpu_blocks_override": 64})
    check_invariance(settings, H200)
    check_invariance(settings, H200, config)
    _, plan = build.plan_pool(settings, config, H200)
    lines = build._summary("tiny", settings, config, H200, plan)
    assert lines["linear"] == "Triton"
    int8 = settings.model_copy(update={"quantization": "int8"})
    assert build._summary("tiny", int8, config, H200, plan)["linear"] == "Triton"


def test_it_is_refused_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "refusal", lambda: "needs version 3.6, this is 3.5.1")
    with on_a_gpu(monkeypatch):
        words = (
            "--batch-invariant is not possible here: Triton, whose kernels it takes, needs version 3.6, this is 3.5.1."
        )
        assert refusal(FLAG) == words


def test_it_is_refused_for_what_may_depend_on_company(tmp_path: Path, triton_serves: None) -> None:
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    flash = FLAG.model_copy(update={"attention_backend": "flash-attn"})
    assert "flash-attn computes a prompt otherwise when others have cached a part of it" in refusal(flash)
    torchs = FLAG.model_copy(update={"attention_backend": "reference"})
    assert "torch reference serves paged_attention, and may depend on what else is in a step." in refusal(
        torchs, config
    )
    other = read_config(tiny_models.build(tmp_path / "other", FALLBACKS["olmo2"]), trust_remote_code=False)
    assert "the library transformers computes this model" in refusal(FLAG, other)


@pytest.mark.parametrize("op", [*invariance.ALONE, "store_kv", "paged_attention"])
def test_every_op_of_a_step_is_looked_at(
    op: str, tmp_path: Path, triton_serves: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(tiny_models.build(tmp_path), trust_remote_code=False)
    plain = SimpleNamespace(name=reference.NAME, op=op)
    monkeypatch.setattr(invariance, "choose", lambda asked, *where: plain if asked == op else choose(asked, *where))
    assert f"torch reference serves {op}, and may depend on what else is in a step." in refusal(FLAG, config)


def test_all_layers_of_a_model_are_packed_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = tiny_models.build(tmp_path), []

    def serve(op, weight, formats=None, backend=AUTO):
        asked.append(backend)
        return reference.pack_linear

    monkeypatch.setattr(ops, "_serve", serve)
    config = read_config(folder, trust_remote_code=False)
    model = load_model(folder, config, torch.float32, 64, lambda fraction: None, backend=INVARIANT)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert asked == [INVARIANT] * len(layers) and all(isinstance(layer.packed, TorchLinear) for layer in layers)
    asked.clear()
    Loaded.load(folder, torch.float32, 64)
    assert set(asked) == {AUTO}
