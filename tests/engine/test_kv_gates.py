"""What each format of the KV cache may cost SmolLM2."""

from collections.abc import Iterator

import pytest
import torch
from engines import threads
from perplexity import cost, losses
from smollm2 import smollm2, smollm2_gguf

from configs.kv_flags import PLAIN, kv_layers
from configs.settings import Settings
from engine.device import usable_cores
from engine.runner.key_fit import KeyFit
from engine.source import ModelSource
from engine.text.sample import FIT_TOKENS, SAMPLE, TRIED_TOKENS
from engine.text.tokenizer import Tokenizer

GATES = {"fp8": 0.5, "int8": 0.3, "int4": 2.0}
"""Per cent above the plain cache's perplexity."""


@pytest.fixture(scope="module", autouse=True)
def all_cores() -> Iterator[None]:
    with threads(usable_cores()):
        yield


@pytest.fixture(scope="module")
def fit() -> KeyFit:
    """As a server finds it."""
    loaded, tokenizer = smollm2(torch.bfloat16), Tokenizer.load(ModelSource(smollm2_gguf(), "smollm2", "test"))
    sample = tokenizer.encode(SAMPLE, add_special_tokens=True)[TRIED_TOKENS : TRIED_TOKENS + FIT_TOKENS]
    plain = loaded.config.kv_layers(PLAIN["bfloat16"])
    return KeyFit.of(loaded.model, plain, sample, loaded.window, loaded.device)


@pytest.mark.parametrize("name", GATES)
def test_a29_a30_a_format_costs_no_more_than_its_gate(fit: KeyFit, name: str) -> None:
    loaded = smollm2(torch.bfloat16)
    layers = kv_layers(Settings.create({"kv_cache_dtype": name}), loaded.config, "bfloat16")
    found = cost(losses(loaded, layers, fit.transforms(layers)))
    assert -1 < found <= GATES[name], found
