"""The Llama family against transformers, in fp32 and eager, without a KV pool."""

from pathlib import Path

import pytest
import torch
from contiguous_attention import ContiguousAttention, whole_sequences
from tiny_models import VARIANTS, TinyLlama, build, load_reference

from configs.model import ModelConfig
from engine.model.base import CausalLM
from engine.model.registry import load_model

SEQUENCES = [[(7 * i * i + 3 * i + 1) % 256 for i in range(length)] for length in (90, 1, 17)]


def load(folder: Path, dtype: torch.dtype = torch.float32, window: int | None = None) -> CausalLM:
    config = ModelConfig.from_source(folder)
    return load_model(folder, config, dtype, config.effective_window(window), lambda fraction: None)


@torch.inference_mode()
def logits_of(model: CausalLM, sequences: list[list[int]], rows: list[int] | None = None) -> torch.Tensor:
    return model(whole_sequences(sequences, rows), ContiguousAttention())


@torch.inference_mode()
def reference_logits(folder: Path, sequences: list[list[int]]) -> torch.Tensor:
    model = load_reference(folder)
    return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in sequences])


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = build(tmp_path, VARIANTS[name])
    ours, theirs = logits_of(load(folder), SEQUENCES), reference_logits(folder, SEQUENCES)
    assert theirs.std() > 0.5, "logits too flat to compare"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_comparison_can_fail(tmp_path: Path) -> None:
    """Another seed, another position encoding: each is seen by the comparison above."""
    ours = logits_of(load(build(tmp_path / "a")), SEQUENCES)
    for index, other in enumerate([TinyLlama(seed=1), VARIANTS["rope-theta"], VARIANTS["rope-linear"]]):
        theirs = reference_logits(build(tmp_path / str(index), other), SEQUENCES)
        assert (ours - theirs).abs().max() > 0.1


def test_mistral_within_its_sliding_window(tmp_path: Path) -> None:
    folder = build(tmp_path, TinyLlama(kind="mistral", sliding_window=90))
    config = ModelConfig.from_source(folder)
    assert config.window == 90
    torch.testing.assert_close(
        logits_of(load(folder), SEQUENCES), reference_logits(folder, SEQUENCES), rtol=1e-4, atol=1e-4
    )


def test_dynamic_frequencies_do_not_depend_on_the_company(tmp_path: Path) -> None:
    """With a window of 4 x 64 tokens, the keys of a short sequence are the same beside a long one."""
    folder = build(tmp_path, TinyLlama(max_position=64, rope={"rope_type": "dynamic", "factor": 4.0}))
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
    assert rounded.dtype == torch.bfloat16
    drift = (exact.softmax(-1) - rounded.float().softmax(-1)).abs().max()
    assert 0 < drift < 0.1
    assert not torch.equal(exact, rounded.float())


def test_loaded_model_has_no_gradients(tmp_path: Path) -> None:
    model = load(build(tmp_path))
    assert not model.training and not list(model.parameters())
    assert all(not buffer.requires_grad for buffer in model.buffers())
