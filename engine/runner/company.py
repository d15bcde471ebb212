"""Does a sequence's answer have the same bits alone and in company? Tried with the whole model, on this machine."""

import torch

from engine.messages import NewRow
from engine.runner.executor import ModelExecutor
from engine.runner.warm_up import plan_of
from engine.sampling_params import SamplingParams

LENGTHS = (21, 1, 13, 34)
"""Prompts of the company; the first is the one that is asked about."""


def compare(executor: ModelExecutor) -> str | None:
    """None if the first logits of a prompt have the same bits computed alone, token by token, as all at once with
    others in the step; else what they depend on, in words.

    Call it before any request: it uses the first slots and blocks, and leaves both as they were.
    """
    runner = executor.runner
    limits, block_size = runner.limits, runner.rows.block_size
    lengths: list[int] = []
    blocks = [0]
    for length in LENGTHS[: limits.max_num_seqs]:
        length = min(length, limits.max_model_len - 1, limits.max_num_batched_tokens - sum(lengths))
        end = blocks[-1] + -(-length // block_size)
        if length < 1 or end > min(len(pool) for pool in runner.pools):
            break
        lengths.append(length)
        blocks.append(end)
    if not lengths:
        return None
    rows = [
        NewRow(
            slot=slot,
            request_id=f"company-{slot}",
            token_ids=[(31 * place + 7 * slot) % runner.config.vocab_size for place in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(),
            index=0,
            block_ids=[list(range(blocks[slot], blocks[slot + 1]))] * len(runner.pools),
            num_computed=0,
        )
        for slot, length in enumerate(lengths)
    ]
    alone = _first_logits(executor, rows[:1], step=1)
    together = _first_logits(executor, rows[1:] + rows[:1], step=limits.max_num_batched_tokens)
    for pool in runner.pools:
        pool[: blocks[-1]] = 0
    if torch.equal(alone[-1], together[-1]):
        return None
    return "other bits in steps of one token than beside others"


def _first_logits(executor: ModelExecutor, rows: list[NewRow], step: int) -> torch.Tensor:
    """[rows, vocab]: of prompts that end in the same step, computed in steps of at most `step` tokens each. The slots
    are free again afterwards."""
    slots, left = [row.slot for row in rows], [len(row.token_ids) for row in rows]
    logits = torch.empty(0)
    new_rows = rows
    while any(left):
        tokens = [min(step, count) for count in left]
        left = [count - now for count, now in zip(left, tokens, strict=True)]
        handle = executor.forward(plan_of(slots, tokens, new_rows, samples=not any(left)))
        if not any(left):
            logits = executor.logits_of(handle).clone()
        executor.sample(handle, None)
        new_rows = []
    executor.forward(plan_of([], [], freed_slots=slots))
    executor.shutdown()
    return logits
