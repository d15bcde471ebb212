"""Int8 weights in whole engines: exact whatever the company, and what they cost SmolLM2."""

import math
import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from engines import Completion, Loaded
from exact_ways import WAYS, Requests, alone, assert_equal
from smollm2 import smollm2_gguf
from tiny_models import VARIANTS, build

from configs.kv_flags import PLAIN
from engine.runner.solo import Solo
from engine.source import ModelSource
from engine.text.tokenizer import Tokenizer

SMOLLM2 = Requests.of((3, 31, 130), range(3, 49152), few_blocks=18)
TINY = Requests.of((3, 16, 31, 75, 130), range(256), few_blocks=20)
TOKENS, SEQUENCE, ROWS = 8192, 2048, 128
GATE = 0.5
"""Per cent above the perplexity of bf16 weights. The standard error of this sample is 0.13; fewer say too little."""


@pytest.fixture(scope="module")
def bf16() -> torch.dtype:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor does not compute in bf16")
    return torch.bfloat16


@pytest.fixture(scope="module")
def smol(bf16: torch.dtype) -> Loaded:
    return Loaded.load(smollm2_gguf(), bf16, 2048, quantization="int8")


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


@torch.inference_mode()
def test_int8_weights_cost_no_more_than_the_gate(smol: Loaded, bf16: torch.dtype) -> None:
    """Perplexity over a part of the manual that Python brings."""
    path: Path = smollm2_gguf()
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = Tokenizer.load(ModelSource(path, "smollm2", "test")).encode(text[: 8 * TOKENS], add_special_tokens=False)
    plain = Loaded.load(path, bf16, 2048)
    layers = plain.config.kv_layers(PLAIN["bfloat16"])
    losses = []
    for loaded in (plain, smol):
        loss = 0.0
        for first in range(0, TOKENS, SEQUENCE):
            some = ids[first : first + SEQUENCE]
            hidden = Solo(loaded.model, layers, SEQUENCE, loaded.device).hidden(some, chunk=512)
            for row in range(0, SEQUENCE - 1, ROWS):
                following = torch.tensor(some[row + 1 : row + 1 + ROWS])
                logits = loaded.model.logits(hidden[row : row + len(following)]).float()
                loss += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
        losses.append(loss / (TOKENS - TOKENS // SEQUENCE))
    cost = 100 * math.expm1(losses[1] - losses[0])
    assert -1 < cost <= GATE and cost != 0, cost
