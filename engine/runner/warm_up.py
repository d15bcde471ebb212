"""Steps that nobody asked for, before the first request: it finds kernels compiled or chosen, and memory mapped."""

from collections.abc import Sequence

from engine.messages import NewRow, StepPlan
from engine.runner.executor import ModelExecutor
from engine.sampling_params import SamplingParams

SEQUENCES, TOKENS = 8, 256
"""Of a CPU's warm-up: all steps there have the same kernels."""
RATIO = 1.25
"""From a number of tokens to the next. Which kernel a GPU computes with changes at some of them, which lie further
apart (`kernels.triton.linear.TILES`)."""
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.9, logprobs=1),
)
"""Whoever draws, and however."""


def warm_up(executor: ModelExecutor, largest: bool = False) -> None:
    """Call it before any request: it uses the first slots and blocks, and leaves both as they were.

    largest: from as many sequences and tokens as a step may have, so that a GPU which has no memory for it is found out
    now, down to one: how many there are decides there which kernels compute, and each is compiled at its first use.
    """
    limits, sequences, most = executor.runner.limits, SEQUENCES, TOKENS
    if largest:
        sequences, most = limits.max_num_seqs, limits.max_num_batched_tokens
    tokens = most
    while tokens:
        _try(executor, max(1, sequences * tokens // most), tokens)
        tokens = int(tokens / RATIO) if largest else 0
    executor.shutdown()


def _try(executor: ModelExecutor, sequences: int, tokens: int) -> None:
    """Of no more than so many sequences and tokens: a step that refreshes, where there is a scratch; one of prompts;
    and one of the tokens after them, with a copy of a block."""
    runner = executor.runner
    if runner.refresh is not None:
        [row] = rows = _rows(executor, 1, tokens)
        run(executor, plan_of([0], [len(row.token_ids)], rows, samples=False, refreshed_slots=[0]))
        _leave(executor, rows)
    rows = _rows(executor, sequences, tokens)
    slots = [row.slot for row in rows]
    run(executor, plan_of(slots, [len(row.token_ids) for row in rows], rows))
    if runner.limits.max_model_len > 2:
        copies = [(group, 0, 0) for group in range(len(runner.pools))]
        run(executor, plan_of(slots, [1] * len(slots), copies=copies))
    _leave(executor, rows)


def _leave(executor: ModelExecutor, rows: Sequence[NewRow]) -> None:
    """Slots and blocks as they were."""
    run(executor, plan_of([], [], freed_slots=[row.slot for row in rows]))
    for pool in executor.runner.pools:
        pool[: sum(len(row.block_ids[0]) for row in rows)] = 0


def _rows(executor: ModelExecutor, sequences: int, tokens: int) -> list[NewRow]:
    """Prompts of one length, each in blocks of its own that have room for a token more."""
    limits, pools, block_size = executor.runner.limits, executor.runner.pools, executor.rows.block_size
    num_pages = min(len(pool) for pool in pools)
    count = min(limits.max_num_seqs, num_pages, sequences)
    length = min(tokens // count, limits.max_model_len - 2, limits.max_num_batched_tokens // count)
    length = max(1, min(length, num_pages // count * block_size - 1))
    blocks = -(-(length + 1) // block_size)
    return [
        NewRow(
            slot=slot,
            request_id=f"warm-up-{slot}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            params=KINDS[slot % len(KINDS)],
            index=0,
            block_ids=[list(range(slot * blocks, (slot + 1) * blocks))] * len(pools),
            num_computed=0,
        )
        for slot in range(count)
    ]


def run(executor: ModelExecutor, plan: StepPlan) -> None:
    executor.sample(executor.forward(plan), None)


def plan_of(
    slots: Sequence[int],
    num_tokens: Sequence[int],
    new_rows: Sequence[NewRow] = (),
    samples: bool = True,
    copies: Sequence[tuple[int, int, int]] = (),
    freed_slots: Sequence[int] = (),
    refreshed_slots: Sequence[int] = (),
) -> StepPlan:
    """A step that the scheduler did not plan. samples: of all rows."""
    return StepPlan(
        step=-1,
        slots=list(slots),
        num_tokens=list(num_tokens),
        samples=[samples] * len(slots),
        new_rows=list(new_rows),
        new_blocks=[],
        copies=list(copies),
        transfers=[],
        freed_slots=list(freed_slots),
        refreshed_slots=list(refreshed_slots),
    )
