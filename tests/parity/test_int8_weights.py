"""Int8 weights in whole engines: exact whatever the company, and what they cost SmolLM2."""

import pytest
import torch
from engines import Completion, Loaded
from exact_ways import WAYS, Requests, alone, assert_equal
from perplexity import cost, losses, plain_losses
from smollm2 import smollm2_gguf
from tiny_models import VARIANTS, build

from configs.kv_flags import PLAIN

SMOLLM2 = Requests.of((3, 31, 130), range(3, 49152), few_blocks=18)
TINY = Requests.of((3, 16, 31, 75, 130), range(256), few_blocks=20)
SEQUENCES = 4
"""The standard error of what they say about the cost is 0.13 per cent; fewer say too little."""
GATE = 0.5
"""Per cent above the perplexity of bf16 weights."""


@pytest.fixture(scope="module")
def bf16() -> torch.dtype:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    return torch.bfloat16


@pytest.fixture(scope="module")
def smol(bf16: torch.dtype) -> Loaded:
    return Loaded.load(smollm2_gguf(), bf16, 8192, quantization="int8")


@pytest.fixture(scope="module", params=[("gqa", torch.float32), ("gemma3", torch.bfloat16)], ids=str)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    name, dtype = request.param
    if dtype is torch.bfloat16:
        request.getfixturevalue("bf16")
    return Loaded.load(build(tmp_path_factory.mktemp(name), VARIANTS[name]), dtype, 256, quantization="int8")


@pytest.fixture(scope="module")
def tiny_alone(tiny: Loaded) -> list[Completion]:
    return alone(tiny, TINY)


@pytest.mark.parametrize("way", WAYS)
def test_bits(tiny: Loaded, tiny_alone: list[Completion], way: str) -> None:
    assert_equal(WAYS[way](tiny, TINY), tiny_alone)


def test_bits_of_smollm2_in_company(smol: Loaded) -> None:
    assert_equal(WAYS["among 32 others"](smol, SMOLLM2), alone(smol, SMOLLM2))


def test_int8_weights_cost_no_more_than_the_gate(smol: Loaded) -> None:
    layers = smol.config.kv_layers(PLAIN["bfloat16"])
    found = cost(losses(smol, layers, sequences=SEQUENCES), plain_losses("bfloat16", SEQUENCES))
    assert -1 < found <= GATE and found != 0, found
