"""Weights into classes of transformers: what is loaded, refused and checked."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_code import own_model
from safetensors.torch import load_file, save_file
from tiny_models import FALLBACKS, TinyModel, build, longrope
from torch import nn

from configs.model_rope import RopeConfig
from engine.errors import StartupError
from engine.model.fallback.attention import PackedExperts
from engine.model.fallback.model import TransformersModel
from engine.model.layers.linear import Linear
from engine.model.layers.rotary import inverse_frequencies
from engine.model.registry import load_model, read_config


def load(
    folder: Path, dtype: torch.dtype = torch.float32, window: int = 256, trust_remote_code: bool = False
) -> TransformersModel:
    config = read_config(folder, trust_remote_code)
    seen: list[float] = []
    model = load_model(folder, config, dtype, window, seen.append)
    assert isinstance(model, TransformersModel) and seen == sorted(seen) and seen[-1] == 1.0
    return model


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(StartupError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert message.startswith("--model: ") and "\n" not in message
    return message


# ------------------------------------------------------------------ what is put in
@pytest.mark.parametrize("name", sorted(FALLBACKS))
def test_every_linear_layer_is_ours(name: str, tmp_path: Path) -> None:
    model = load(build(tmp_path, FALLBACKS[name]))
    kinds = [type(module) for module in model.modules()]
    assert not any(issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D" for kind in kinds)
    assert sum(issubclass(kind, Linear) for kind in kinds) >= 2 * FALLBACKS[name].num_layers + 1
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_experts_are_packed_and_not_kept_twice(tmp_path: Path) -> None:
    model = load(build(tmp_path, FALLBACKS["mixtral"]))
    experts = [module for module in model.modules() if hasattr(module, "packed_experts")]
    assert len(experts) == 2
    for module in experts:
        assert isinstance(module.packed_experts, PackedExperts) and len(module.packed_experts.first) == 4
        assert module.gate_up_proj is None and module.down_proj is None


# ------------------------------------------------------------------ positions
ROPES = {
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, RopeConfig("dynamic", 10000.0, 4.0)),
    "longrope": (longrope(8), None),
}


@pytest.mark.parametrize("window", [48, 64, 200])
def test_frequencies_follow_the_window_and_stay(window: int, tmp_path: Path) -> None:
    """As for our own families; transformers would look at each call's longest position."""
    rope, ours = ROPES["dynamic"]
    folder = build(tmp_path, TinyModel(kind="olmo2", rope=rope, max_position=64))
    assert ours is not None
    model = load(folder, window=window)
    found = model.body.rotary_emb
    torch.testing.assert_close(found.inv_freq, inverse_frequencies(ours, 16, 64, window), rtol=1e-6, atol=0)
    before = found.inv_freq.clone()
    for position in (0, 30, 63, 190):
        found(torch.zeros(1), torch.tensor([[position]]))
    assert torch.equal(found.inv_freq, before)


@pytest.mark.parametrize(("window", "divisor"), [(64, 1.0), (200, 1.5)])
def test_longrope_takes_one_set(window: int, divisor: float, tmp_path: Path) -> None:
    extra = {"original_max_position_embeddings": 64}
    rope = {**longrope(8), **extra, "factor": 4.0}
    folder = build(tmp_path, TinyModel(kind="olmo2", rope=rope, max_position=256, extra=extra))
    found = load(folder, window=window).body.rotary_emb
    assert found.inv_freq[0] == pytest.approx(1.0 / divisor)
    for position in (0, 100):
        found(torch.zeros(1), torch.tensor([[position]]))
    assert found.inv_freq[0] == pytest.approx(1.0 / divisor)


# ------------------------------------------------------------------ what is refused
def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = build(tmp_path, FALLBACKS["olmo2"])
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    folder = build(tmp_path, FALLBACKS["olmo2"])
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 112}))
    message = refusal(folder)
    assert "holds, in another shape, model.layers.0.mlp.down_proj.weight" in message
    assert "the weights and the configuration do not belong together" in message


def test_weights_that_have_no_place(tmp_path: Path) -> None:
    folder = build(tmp_path, FALLBACKS["olmo2"])
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "holds, with no place for it, model.layers.0.self_attn.q_proj.bias" in refusal(folder)


def test_quantised_weights_that_the_configuration_does_not_mention(tmp_path: Path) -> None:
    folder = build(tmp_path, FALLBACKS["olmo2"])
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight is stored as F8_E4M3" in refusal(folder)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    folder = build(tmp_path, FALLBACKS["olmo2"])
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/other"}')
    assert "holds an adapter" in refusal(folder)


def test_a_model_that_fails_in_its_own_code(tmp_path: Path) -> None:
    folder = own_model(tmp_path, "if len(x[0]) != 8 else 1 / 0")
    assert "OwnForCausalLM cannot be run by Octavo (ZeroDivisionError" in refusal(
        folder, window=100, trust_remote_code=True
    )


def test_old_weights_are_let_go_one_by_one(tmp_path: Path) -> None:
    """Never a second copy of the model."""
    folder = build(tmp_path, FALLBACKS["gpt_neox"])
    alive: list[int] = []
    config = read_config(folder, False)

    def count(fraction: float) -> None:
        gc.collect()  # of what the load has made: all else is frozen
        alive.append(sum(type(thing) is nn.Linear and not thing.weight.is_meta for thing in gc.get_objects()))

    gc.collect()
    gc.freeze()
    try:
        load_model(folder, config, torch.float32, 256, count)
    finally:
        gc.unfreeze()
    assert alive == list(range(alive[0], alive[0] - len(alive), -1)) and alive[-1] <= 1


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    folder = build(tmp_path, FALLBACKS["olmo2"])
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "damaged or incomplete" in refusal(folder)
    weights.unlink()
    assert "no weights" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "no safetensors, only pytorch_model.bin" in refusal(folder)


# ------------------------------------------------------------------ code that comes with the model
def test_own_code_runs_where_it_is_trusted(tmp_path: Path) -> None:
    folder = own_model(tmp_path)
    assert "--trust-remote-code" in refusal(folder)
    assert isinstance(load(folder, window=100, trust_remote_code=True), TransformersModel)


def test_own_code_that_ends_the_process_does_not(tmp_path: Path) -> None:
    folder = own_model(tmp_path)
    (folder / "own.py").write_text("import sys\n\nsys.exit(7)\n")
    assert "cannot read its configuration (SystemExit: 7)" in refusal(folder, trust_remote_code=True)


@pytest.mark.parametrize(
    "sum_of",
    ["+ x.flip(1)", "+ x.cumsum(1)", "+ 0.5 * x.mean(1, keepdim=True)"],
    ids=["later tokens", "a state", "the whole step"],
)
def test_a_model_that_keeps_more_than_keys_and_values_is_found_out(sum_of: str, tmp_path: Path) -> None:
    """By numbers: nothing in its calls for attention shows it."""
    folder = own_model(tmp_path, sum_of)
    message = refusal(folder, window=100, trust_remote_code=True)
    assert "OwnForCausalLM does not give transformers' own numbers" in message
