"""Does a sequence's answer have the same bits alone and in company? Tried with the whole model, on this machine."""

import torch

from engine.messages import NewRow, StepPlan
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

LENGTHS = (21, 1, 13, 34)
"""Prompts of the company; the first is the one that is asked about."""


def compare(runner: ModelRunner) -> str | None:
    """None if the first logits of a prompt have the same bits computed alone, token by token, as all at once with
    others in the step; else what they depend on, in words.

    Call it before any request: it uses the first slots and blocks, and leaves both as they were.
    """
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
    alone = _first_logits(runner, rows[:1], step=1)
    together = _first_logits(runner, rows[1:] + rows[:1], step=limits.max_num_batched_tokens)
    for pool in runner.pools:
        pool[: blocks[-1]] = 0
    if torch.equal(alone[-1], together[-1]):
        return None
    return "other bits in steps of one token than beside others"


def _first_logits(runner: ModelRunner, rows: list[NewRow], step: int) -> torch.Tensor:
    """[rows, vocab]: of prompts computed in the same steps, of at most `step` tokens each. The slots are free again
    afterwards."""
    slots, left = [row.slot for row in rows], [len(row.token_ids) for row in rows]
    logits = torch.empty(0)
    new_rows = rows
    while any(left):
        tokens = [min(step, count) for count in left]
        left = [count - now for count, now in zip(left, tokens, strict=True)]
        plan = StepPlan(
            step=-1,
            slots=slots,
            num_tokens=tokens,
            samples=[True] * len(slots),
            new_rows=new_rows,
            new_blocks=[],
            copies=[],
            transfers=[],
            freed_slots=[],
        )
        runner.apply(plan)
        hidden = runner.forward(plan)
        assert hidden is not None
        logits, new_rows = runner.logits(hidden).clone(), []
    for slot in slots:
        runner.rows.release(slot)
    return logits
