"""What transformers itself would write."""

from collections.abc import Sequence

import torch


def oracle(model: torch.nn.Module, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """transformers' likeliest token after each prompt and after every beginning of its text, in one pass over both.

    Where these are the text itself, it is, token after token, what greedy generation writes.
    """
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :]
        found.append(logits.argmax(dim=-1).tolist())
    return found
