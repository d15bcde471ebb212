"""The head's logits are fp32, whatever the model computes in."""

import torch

from engine.model.layers.embedding import Head


def test_tokens_that_bf16_cannot_tell_apart_are_told_apart() -> None:
    weight = torch.full((3, 64), 0.390625)  # a logit of 25; numbers of bf16 are an eighth apart there
    weight[1, 5] += 1 / 32
    head = Head(3, 64, torch.bfloat16)
    head.load_part("", "weight", weight)
    logits = head(torch.ones(1, 64, dtype=torch.bfloat16))
    assert logits.dtype is torch.float32 and logits.tolist() == [[25.0, 25.03125, 25.0]]
