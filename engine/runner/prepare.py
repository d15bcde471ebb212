"""StepPlan to ForwardBatch: numpy gathers from the rows into a buffer that is made once (`staging`).

A step's tensors are views of that buffer, or of its copy on the device: they are valid until the next `build`. Each
begins where that of every other step does, as `recorded` needs it.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import StepPlan
from engine.model.interface import ForwardBatch
from engine.runner.request_rows import RequestRows
from engine.runner.staging import CudaLink, Link, Staging


def link_to(device: torch.device) -> Link | None:
    """None: the CPU reads what the host writes."""
    return None if device.type == "cpu" else CudaLink()


class BatchBuilder:
    """`build` costs tens of microseconds: nothing in it loops over rows in Python, nor waits for a device."""

    def __init__(self, rows: RequestRows, max_num_batched_tokens: int, device: torch.device, link: Link | None) -> None:
        """`link`: as `link_to(device)` says."""
        self.rows = rows
        sequences, tokens = rows.max_num_seqs, max(max_num_batched_tokens, rows.max_num_seqs)
        self._tokens = tokens + 2
        groups = len(rows.block_tables)
        halves = [sequences + 1, sequences, *[table.size for table in rows.block_tables]]
        words = [self._tokens] * (3 + groups) + [-(-count // 2) for count in halves]
        self._staging = Staging(words, device, link)
        self._arange = np.arange(tokens + 1, dtype=np.int64)

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Gathers the plan's tokens, at least one. Does not change the rows."""
        rows, staging, count = self.rows, self._staging, len(plan.slots)
        slots = np.array(plan.slots, np.int64)
        computed = rows.num_computed[slots]
        starts_and_ends = self._arange[: count + 1]
        if max(plan.num_tokens) == 1:
            owner, positions, seq_lens = slots, computed, computed + 1
        else:
            num_tokens = np.array(plan.num_tokens, np.int64)
            starts_and_ends = np.concatenate([starts_and_ends[:1], num_tokens.cumsum()])
            owner, seq_lens = slots.repeat(num_tokens), computed + num_tokens
            positions = self._arange[: len(owner)] + (computed - starts_and_ends[:-1]).repeat(num_tokens)
        ends = starts_and_ends[1:]
        read = ends[np.array(plan.samples, np.bool_)] - 1
        if plan.scored_slots:
            read = np.concatenate([read, *self._scored_rows(plan, ends)])
        block, offset = np.divmod(positions, rows.block_size)
        width = -(-int(seq_lens.max()) // rows.block_size)
        staging.begin()
        batch = ForwardBatch(
            input_ids=staging.int64(rows.token_ids[owner, positions]),
            positions=staging.int64(positions),
            slot_mapping=tuple(
                staging.int64(table[owner, block].astype(np.int64) * rows.block_size + offset)
                for table in rows.block_tables
            ),
            logit_rows=staging.int64(read),
            query_start=staging.int32(starts_and_ends),
            seq_lens=staging.int32(seq_lens),
            block_tables=tuple(staging.table(table[slots, :width], table.shape[1]) for table in rows.block_tables),
        )
        staging.send()
        return batch

    def largest(self) -> ForwardBatch:
        """Where the batches lie: tensors of more tokens, and of more rows to read, than any has; values undefined. The
        numbers of tokens, of rows to read and of sequences differ. To be called before any `build`."""
        tokens, staging, tables = self._tokens, self._staging, self.rows.block_tables
        staging.begin()
        return ForwardBatch(
            input_ids=staging.int64(np.zeros(tokens)),
            positions=staging.int64(np.zeros(tokens)),
            slot_mapping=tuple(staging.int64(np.zeros(tokens)) for _ in tables),
            logit_rows=staging.int64(np.zeros(tokens - 1)),
            query_start=staging.int32(np.zeros(2)),
            seq_lens=staging.int32(np.zeros(1)),
            block_tables=tuple(staging.table(np.zeros((1, table.shape[1])), table.shape[1]) for table in tables),
        )

    def _scored_rows(self, plan: StepPlan, ends: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """For each of `plan.scored_slots`: its rows that a prompt token follows."""
        rows = []
        for slot in plan.scored_slots:
            place = plan.slots.index(slot)
            tokens = plan.num_tokens[place]
            start = int(ends[place]) - tokens
            behind = int(self.rows.num_prompt[slot]) - 1 - int(self.rows.num_computed[slot])
            rows.append(self._arange[start : start + min(tokens, behind)])
        return rows
