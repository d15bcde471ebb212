"""Perplexity of SmolLM2, as a server computes it, over 20,000 tokens of the manual that Python brings."""

import math
import pydoc_data.topics
from collections.abc import Sequence
from functools import cache

import torch
from engines import Loaded
from smollm2 import smollm2, smollm2_gguf

from configs.kv import LayerKV
from configs.kv_flags import PLAIN
from configs.model import DType
from engine.runner.kv_store import KVTransforms
from engine.runner.solo import Solo
from engine.source import ModelSource
from engine.text.tokenizer import Tokenizer

SEQUENCE, SEQUENCES, ROWS = 2048, 10, 128
"""Tokens, and rows of logits at a time: few enough to stay in the cache."""


@torch.inference_mode()
def losses(
    loaded: Loaded,
    layers: Sequence[LayerKV],
    transforms: Sequence[KVTransforms] | None = None,
    *,
    sequences: int,
) -> list[float]:
    """Of each of the first `sequences`, in nats, the sum over its tokens but the first."""
    found = []
    for ids in texts()[:sequences]:
        hidden = Solo(loaded.model, layers, SEQUENCE, loaded.device, transforms).hidden(ids, chunk=512)
        loss = 0.0
        for first in range(0, SEQUENCE - 1, ROWS):
            following = torch.tensor(ids[first + 1 : first + 1 + ROWS])
            logits = loaded.model.logits(hidden[first : first + len(following)]).float()
            loss += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
        found.append(loss)
    return found


def cost(found: Sequence[float], plain: Sequence[float]) -> float:
    """Per cent by which the perplexity of `found` is above that of `plain`, of the same sequences."""
    assert len(found) == len(plain)
    return 100 * math.expm1((sum(found) - sum(plain)) / (len(found) * (SEQUENCE - 1)))


@cache
def plain_losses(dtype: DType, sequences: int) -> list[float]:
    """With weights and cache in `dtype`."""
    loaded = smollm2(getattr(torch, dtype))
    return losses(loaded, loaded.config.kv_layers(PLAIN[dtype]), sequences=sequences)


@cache
def texts() -> list[list[int]]:
    tokenizer = Tokenizer.load(ModelSource(smollm2_gguf(), "smollm2", "test"))
    text = "\n\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer.encode(text[: 8 * SEQUENCE * SEQUENCES], add_special_tokens=False)
    return [ids[first : first + SEQUENCE] for first in range(0, SEQUENCE * SEQUENCES, SEQUENCE)]
