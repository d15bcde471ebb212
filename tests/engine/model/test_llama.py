"""Every family against transformers, in fp32 and eager, without a KV pool."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from contiguous_attention import ContiguousAttention, whole_sequences
from tiny_models import VARIANTS, TinyModel, build, load_reference

from configs.model_rope import RopeConfig
from configs.supported import read_model
from engine.model.base import CausalLM
from engine.model.registry import load_model

SEQUENCES = [[(7 * i * i + 3 * i + 1) % 256 for i in range(length)] for length in (90, 1, 17)]


def load(folder: Path, dtype: torch.dtype = torch.float32, window: int | None = None) -> CausalLM:
    config = read_model(folder)
    return load_model(folder, config, dtype, config.effective_window(window), lambda fraction: None)


@torch.inference_mode()
def logits_of(model: CausalLM, sequences: list[list[int]], rows: list[int] | None = None) -> torch.Tensor:
    return model(whole_sequences(sequences, rows), ContiguousAttention(model.config))


@torch.inference_mode()
def reference_logits(folder: Path, sequences: list[list[int]], window: int = 0) -> torch.Tensor:
    model = load_reference(folder, window=window)
    return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences])


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, VARIANTS[name])
    ours, theirs = logits_of(load(folder, window=256), SEQUENCES), reference_logits(folder, SEQUENCES, 256)
    assert theirs.std() > 0.5, "logits too flat to compare"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_comparison_can_fail(tmp_path: Path) -> None:
    """Another seed, another position encoding: each is seen by the comparison above."""
    ours = logits_of(load(build(tmp_path / "a")), SEQUENCES)
    for index, other in enumerate([TinyModel(seed=1), VARIANTS["rope-theta"], VARIANTS["rope-linear"]]):
        theirs = reference_logits(build(tmp_path / str(index), other), SEQUENCES)
        assert (ours - theirs).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"layer_windows": (25, 24)}),
        ("qwen2-window", {"layer_windows": (24, None)}),
        ("qwen3", {"attention_scale": 0.2}),
        ("phi3", {"layer_windows": (None, None)}),
        ("phi3-long", {"rotary_dim": 16, "rope": RopeConfig("none", 10000.0)}),
        ("gemma3", {"activation": "silu"}),
        ("gemma3", {"embedding_scale": 1.0}),
        ("gemma3", {"zero_centred_norms": False}),
        ("gemma3", {"local_rope": None}),
        ("gemma3", {"local_rope": RopeConfig("none", 1e6), "rope": RopeConfig("none", 1e4)}),
        ("gemma3", {"layer_windows": (24, None, 24)}),
        ("gemma3", {"attention_scale": 32**-0.5}),
    ],
)
def test_every_fact_matters(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The comparison above sees each thing that sets a family apart, were it another."""
    folder = build(tmp_path, VARIANTS[name])
    config = dataclasses.replace(read_model(folder), **changes)
    ours = logits_of(load_model(folder, config, torch.float32, 256, lambda fraction: None), SEQUENCES)
    assert (ours - reference_logits(folder, SEQUENCES, 256)).abs().max() > 0.01


def test_the_head_is_apart(tmp_path: Path) -> None:
    """Hidden states go through it in any pieces."""
    model = load(build(tmp_path))
    with torch.inference_mode():
        hidden = model.hidden(whole_sequences(SEQUENCES), ContiguousAttention(model.config))
        pieces = torch.cat([model.logits(piece) for piece in hidden.split(40)])
    assert hidden.shape == (108, 64)
    assert torch.equal(pieces, logits_of(model, SEQUENCES))


def test_longrope_is_chosen_by_the_window(tmp_path: Path) -> None:
    """One set of divisors for all sequences, short and long, whatever their company."""
    folder = build(tmp_path, VARIANTS["phi3-long"])
    for window in (64, 65):
        sequences = [sequence[:64] for sequence in SEQUENCES]
        ours, theirs = logits_of(load(folder, window=window), sequences), reference_logits(folder, sequences, window)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        other = reference_logits(folder, sequences, 129 - window)
        assert (ours - other).abs().max() > 0.01


@pytest.mark.parametrize("name", ["gqa", "qwen2", "qwen3", "phi3-long", "gemma3"])
def test_bfloat16_equals_transformers_rounding_for_rounding(name: str, tmp_path: Path) -> None:
    """Norms, gates and scales round where transformers does: bf16 drifts from it far less than from fp32."""
    folder = build(tmp_path, VARIANTS[name])
    exact = reference_logits(folder, SEQUENCES, 256)
    with torch.inference_mode():
        reference = load_reference(folder, torch.bfloat16, window=256)
        theirs = torch.cat([reference(torch.tensor([s])).logits[0] for s in SEQUENCES]).float()
    ours = logits_of(load(folder, torch.bfloat16, window=256), SEQUENCES).float()
    assert (ours - theirs).square().mean() < 1.5 * (theirs - exact).square().mean()
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


def test_dynamic_frequencies_do_not_depend_on_the_company(tmp_path: Path) -> None:
    """With a window of 4 x 64 tokens, the keys of a short sequence are the same beside a long one."""
    folder = build(tmp_path, TinyModel(max_position=64, rope={"rope_type": "dynamic", "factor": 4.0}))
    model = load(folder, window=256)
    long = [i % 256 for i in range(200)]
    alone, beside = logits_of(model, [SEQUENCES[2]]), logits_of(model, [long, SEQUENCES[2]])[200:]
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-5)
    theirs = reference_logits(folder, [[i % 256 for i in range(256)]])
    ours = logits_of(model, [[i % 256 for i in range(256)]])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # both stretched to 256 tokens


def test_only_the_rows_asked_for(tmp_path: Path) -> None:
    model = load(build(tmp_path))
    everything = logits_of(model, SEQUENCES)
    some = logits_of(model, SEQUENCES, rows=[89, 90, 107, 3])
    torch.testing.assert_close(some, everything[[89, 90, 107, 3]], rtol=1e-5, atol=1e-5)
    assert logits_of(model, SEQUENCES, rows=[]).shape == (0, 260)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    folder = build(tmp_path)
    exact, rounded = logits_of(load(folder), SEQUENCES), logits_of(load(folder, torch.bfloat16), SEQUENCES)
    assert rounded.dtype == torch.float32  # logits always are
    drift = (exact.softmax(-1) - rounded.float().softmax(-1)).abs().max()
    assert 0 < drift < 0.1
    assert not torch.equal(exact, rounded.float())


def test_loaded_model_has_no_gradients(tmp_path: Path) -> None:
    model = load(build(tmp_path))
    assert not model.training and not list(model.parameters())
    assert all(not buffer.requires_grad for buffer in model.buffers())
