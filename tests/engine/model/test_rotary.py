"""Rotary tables against transformers' own formulas, bit for bit where the formula is the same."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import LLAMA3, longrope, quiet

from configs.decoder import DecoderConfig
from configs.model_rope import RopeConfig
from configs.supported import read_model
from engine.model.layers.rotary import RotaryEmbedding, inverse_frequencies

HEAD_DIM, MAX_POSITION = 64, 4096
KINDS = {
    "none": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 1024},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": longrope(HEAD_DIM // 2) | {"rope_theta": 10000.0, "original_max_position_embeddings": 1024},
}


def config_with(folder: Path, rope: dict[str, object]) -> DecoderConfig:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 260,
        "hidden_size": 4 * HEAD_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": rope,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return read_model(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str, tmp_path: Path) -> None:
    config = config_with(tmp_path, KINDS[kind])
    with quiet():
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
        cos, sin = theirs(torch.zeros(1), torch.arange(MAX_POSITION)[None])
    frequencies = inverse_frequencies(config.rope, HEAD_DIM, MAX_POSITION, MAX_POSITION)
    assert torch.equal(frequencies, theirs.inv_freq)
    assert config.rope.attention_factor == pytest.approx(theirs.attention_scaling)
    ours = RotaryEmbedding(config.rope, HEAD_DIM, MAX_POSITION, MAX_POSITION)
    torch.testing.assert_close(ours.cos, cos[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-7)
    torch.testing.assert_close(ours.sin, sin[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-7)
    assert ours.cos.dtype == ours.sin.dtype == torch.float32


def test_dynamic_is_plain_up_to_the_window_of_training() -> None:
    plain, dynamic = RopeConfig("none", 10000.0), RopeConfig("dynamic", 10000.0, 4.0)
    expected = inverse_frequencies(plain, HEAD_DIM, MAX_POSITION, MAX_POSITION)
    assert torch.equal(inverse_frequencies(dynamic, HEAD_DIM, MAX_POSITION, MAX_POSITION // 2), expected)
    assert torch.equal(inverse_frequencies(dynamic, HEAD_DIM, MAX_POSITION, MAX_POSITION), expected)
    stretched = inverse_frequencies(dynamic, HEAD_DIM, MAX_POSITION, 2 * MAX_POSITION)
    assert (stretched[1:] < expected[1:]).all()


def test_longrope_changes_its_divisors_beyond_the_first_window(tmp_path: Path) -> None:
    rope = config_with(tmp_path, KINDS["longrope"]).rope
    plain = inverse_frequencies(RopeConfig("none", rope.theta), HEAD_DIM, MAX_POSITION, MAX_POSITION)
    for window, divisors in ((1024, rope.divisors), (1025, rope.long_divisors)):
        frequencies = inverse_frequencies(rope, HEAD_DIM, MAX_POSITION, window)
        torch.testing.assert_close(frequencies, plain / torch.tensor(divisors), rtol=1e-6, atol=0)


def test_divisors_are_llama3_scaling_as_gguf_carries_it(tmp_path: Path) -> None:
    llama3 = config_with(tmp_path, KINDS["llama3"]).rope
    plain = inverse_frequencies(RopeConfig("none", llama3.theta), HEAD_DIM, MAX_POSITION, MAX_POSITION)
    scaled = inverse_frequencies(llama3, HEAD_DIM, MAX_POSITION, MAX_POSITION)
    divisors = RopeConfig("divisors", llama3.theta, divisors=tuple((plain / scaled).tolist()))
    torch.testing.assert_close(
        inverse_frequencies(divisors, HEAD_DIM, MAX_POSITION, MAX_POSITION), scaled, rtol=1e-6, atol=0
    )
    assert not torch.equal(plain, scaled)


def test_table_has_one_row_a_position_of_the_window(tmp_path: Path) -> None:
    tables = RotaryEmbedding(config_with(tmp_path, KINDS["none"]).rope, HEAD_DIM, MAX_POSITION, 100)
    assert tables.cos.shape == tables.sin.shape == (100, HEAD_DIM // 2)
