"""What each format of the KV cache may cost SmolLM2: perplexity over 20,000 tokens of the manual that Python brings."""

import math
import pydoc_data.topics
from collections.abc import Iterator, Sequence

import pytest
import torch
from engines import Loaded
from smollm2 import smollm2_gguf

from configs.kv import LayerKV
from configs.kv_flags import PLAIN, kv_layers
from configs.settings import Settings
from engine.device import usable_cores
from engine.runner.key_fit import KeyFit
from engine.runner.solo import Solo
from engine.source import ModelSource
from engine.text.sample import FIT_TOKENS, SAMPLE, TRIED_TOKENS
from engine.text.tokenizer import Tokenizer
from kernels.threads import num_threads, set_threads

CPU = torch.device("cpu")
SEQUENCE, SEQUENCES, ROWS = 2048, 10, 256
GATES = {"fp8": 0.5, "int8": 0.3, "int4": 2.0}
"""Per cent above the plain cache's perplexity."""


@pytest.fixture(scope="module")
def perplexity() -> Iterator["Perplexity"]:
    before = num_threads()
    set_threads(usable_cores())
    yield Perplexity()
    set_threads(before)


class Perplexity:
    """Of bf16, as a server computes."""

    def __init__(self) -> None:
        path = smollm2_gguf()
        self.loaded = Loaded.load(path, torch.bfloat16, 8192)
        tokenizer = Tokenizer.load(ModelSource(path, "smollm2", "test"))
        text = "\n\n".join(pydoc_data.topics.topics.values())
        ids = tokenizer.encode(text[: 8 * SEQUENCE * SEQUENCES], add_special_tokens=False)
        self.texts = [ids[first : first + SEQUENCE] for first in range(0, SEQUENCE * SEQUENCES, SEQUENCE)]
        sample = tokenizer.encode(SAMPLE, add_special_tokens=True)[TRIED_TOKENS : TRIED_TOKENS + FIT_TOKENS]
        self.plain = self.loaded.config.kv_layers(PLAIN["bfloat16"])
        self.fit = KeyFit.of(self.loaded.model, self.plain, sample, 8192, CPU)
        self.base = self.of(self.plain)

    @torch.inference_mode()
    def of(self, layers: Sequence[LayerKV]) -> float:
        loss = 0.0
        for ids in self.texts:
            hidden = Solo(self.loaded.model, layers, SEQUENCE, CPU, self.fit.transforms(layers)).hidden(ids, chunk=512)
            for first in range(0, SEQUENCE - 1, ROWS):
                following = torch.tensor(ids[first + 1 : first + 1 + ROWS])
                logits = self.loaded.model.logits(hidden[first : first + len(following)]).float()
                loss += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
        return math.exp(loss / ((SEQUENCE - 1) * SEQUENCES))


@pytest.mark.parametrize("name", GATES)
def test_a29_a30_a_format_costs_no_more_than_its_gate(perplexity: Perplexity, name: str) -> None:
    layers = kv_layers(Settings.create({"kv_cache_dtype": name}), perplexity.loaded.config, "bfloat16")
    cost = 100 * (perplexity.of(layers) / perplexity.base - 1)
    assert -1 < cost <= GATES[name], (cost, perplexity.base)
