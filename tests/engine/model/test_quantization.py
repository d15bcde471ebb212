"""--quantization int8: which weights are quantised, from what, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import Engine, Loaded
from safetensors.torch import load_file, save_file

from configs.pool import Costs
from configs.settings import Settings
from engine.build import build_core
from engine.errors import StartupError
from engine.messages import Launch
from engine.model.layers.linear import Linear
from engine.model.registry import read_config
from engine.runner.solo import Solo
from engine.sampling_params import SamplingParams
from kernels import ops
from kernels.int8_weight import Int8Weight

IDS = list(range(3, 43))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight as int8 keeps it."""
    made = Int8Weight.empty(*weight.shape, weight.device)
    made.fill(slice(0, len(weight)), weight)
    return made.codes * made.scales.unsqueeze(1)


def logits(loaded: Loaded) -> torch.Tensor:
    solo = Solo(loaded.model, loaded.kv_layers, len(IDS), loaded.device)
    with torch.inference_mode():
        return loaded.model.logits(solo.hidden(IDS, chunk=16))


@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_it_is_the_model_with_rounded_weights(name: str, tmp_path: Path) -> None:
    """All linear layers and the head are rounded by rows, tables and norms are not; fused weights like apart ones."""
    folder = tiny_models.build(tmp_path, replace(tiny_models.VARIANTS[name], tied=False))
    found = logits(Loaded.load(folder, torch.float32, 256, quantization="int8"))
    plain = logits(Loaded.load(folder, torch.float32, 256))
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({n: rounded(w) if w.dim() == 2 and "embed" not in n else w for n, w in weights.items()}, file)
    expected = logits(Loaded.load(folder, torch.float32, 256))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - plain).abs().max() > 1e-3


def test_a_tied_head_is_rounded_and_its_embedding_is_not(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, tiny_models.VARIANTS["tied"])
    int8, plain = (Loaded.load(folder, torch.float32, 256, quantization=name) for name in ("int8", "none"))
    table = plain.model.embedding.weight
    assert torch.equal(int8.model.embedding.weight, table)
    x = torch.randn(3, table.shape[1])
    torch.testing.assert_close(int8.model.logits(x), x @ rounded(table).T, atol=1e-4, rtol=1e-4)


def test_one_layer_gathers_at_a_time_in_a_byte_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = Int8Weight.empty

    def counted(outputs: int, inputs: int, device: torch.device) -> Int8Weight:
        taken.append(outputs * inputs)
        return empty(outputs, inputs, device)

    monkeypatch.setattr(Int8Weight, "empty", counted)
    layer = Linear(64, {"q": 32, "k": 16}, bias=True, dtype=torch.bfloat16)
    layer.quantise()
    assert not taken, "nothing before the first part comes"
    q, k, bias = torch.randn(32, 64), torch.randn(16, 64), torch.randn(48)
    layer.load_part("q", "weight", q)
    assert taken == [48 * 64] and not layer._gathered
    layer.load_part("", "bias", bias)
    layer.load_part("k", "weight", k)
    assert layer._codes is None and not layer._gathered
    with pytest.raises(AssertionError):
        layer.quantise()
    x = torch.randn(5, 64).bfloat16()
    expected = x.double() @ rounded(torch.cat([q, k])).double().T + bias.bfloat16().double()
    torch.testing.assert_close(ops.linear(x, layer.packed).double(), expected, atol=0.01, rtol=0.01)


def test_the_numbers_of_the_checkpoint_are_quantised_not_what_bf16_makes_of_them() -> None:
    weight = torch.randn(32, 64)
    layer = Linear(64, {"": 32}, bias=False, dtype=torch.bfloat16)
    layer.quantise()
    filled: list[torch.Tensor] = []
    fill: Callable[..., None] = Int8Weight.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Int8Weight, "fill", lambda self, rows, part: (filled.append(part), fill(self, rows, part)))
        layer.load_part("", "weight", weight)
    assert filled == [weight] or torch.equal(filled[0], weight)
    assert not torch.equal(rounded(weight), rounded(weight.bfloat16()))


def test_start_up_says_it(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path)
    settings = Settings(model=str(folder), quantization="int8", dtype="float32", max_num_seqs=4)
    core, ready = build_core(Launch(str(folder), "tiny", settings.model_dump(mode="json"), ()), lambda loading: None)
    core.shutdown()
    assert "linear layers in int8, all else in float32" in ready.summary["weights"]
    assert ready.summary["answers"].startswith("not changed by other requests")


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_what_transformers_runs_is_refused(name: str, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, tiny_models.FALLBACKS[name])
    settings = Settings(model=str(folder), quantization="int8")
    config = read_config(folder, trust_remote_code=False)
    with pytest.raises(StartupError, match=r"^--quantization int8 .* is run by transformers' code"):
        Costs.of(settings, config, "float32")
    launch = Launch(str(folder), "tiny", settings.model_dump(mode="json"), ())
    with pytest.raises(StartupError, match=r"^--quantization int8 "):
        build_core(launch, lambda loading: None)


def test_a_whole_engine_chooses_the_largest_logit(tmp_path: Path) -> None:
    loaded = Loaded.load(tiny_models.build(tmp_path), torch.float32, 256, quantization="int8")
    [found] = Engine(loaded).run([IDS], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    assert found.token_ids == [int(logits(loaded)[-1].argmax())]
