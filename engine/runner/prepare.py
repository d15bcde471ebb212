"""StepPlan to ForwardBatch: numpy gathers from the rows into buffers that are made once.

A step's tensors are views of those buffers: they are valid until the next `build`.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import StepPlan
from engine.model.interface import ForwardBatch
from engine.runner.request_rows import RequestRows


class _GroupBuffers:
    """What a step needs of one KV group: tensors, and the same memory as arrays."""

    def __init__(self, table: npt.NDArray[np.int32], tokens: int) -> None:
        """`table`: the rows' own, [slots, max_blocks]."""
        self.table = table
        self.slot_mapping = torch.zeros(tokens, dtype=torch.int64)
        self.block_tables = torch.zeros(table.size, dtype=torch.int32)
        self.slots, self.blocks = self.slot_mapping.numpy(), self.block_tables.numpy()


class BatchBuilder:
    """`build` costs tens of microseconds: nothing in it loops over rows in Python."""

    def __init__(self, rows: RequestRows, max_num_batched_tokens: int) -> None:
        self.rows = rows
        sequences, tokens = rows.max_num_seqs, max(max_num_batched_tokens, rows.max_num_seqs)
        self._input_ids = torch.zeros(tokens, dtype=torch.int64)
        self._positions = torch.zeros(tokens, dtype=torch.int64)
        self._query_start = torch.zeros(sequences + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(sequences, dtype=torch.int32)
        self._logit_rows = torch.zeros(sequences + tokens, dtype=torch.int64)
        self._groups = [_GroupBuffers(table, tokens) for table in rows.block_tables]
        self._arange = np.arange(tokens + 1, dtype=np.int64)

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Gathers the plan's tokens, at least one. Does not change the rows."""
        rows, count = self.rows, len(plan.slots)
        slots = np.array(plan.slots, np.int64)
        computed = rows.num_computed[slots]
        decode_only = max(plan.num_tokens) == 1
        if decode_only:
            total, owner, positions = count, slots, computed
            ends = self._arange[1 : count + 1]
            seq_lens = computed + 1
        else:
            num_tokens = np.array(plan.num_tokens, np.int64)
            ends = num_tokens.cumsum()
            total = int(ends[-1])
            owner = slots.repeat(num_tokens)
            positions = self._arange[:total] + (computed - ends + num_tokens).repeat(num_tokens)
            seq_lens = computed + num_tokens
        block, offset = np.divmod(positions, rows.block_size)
        self._input_ids.numpy()[:total] = rows.token_ids[owner, positions]
        self._positions.numpy()[:total] = positions
        self._query_start.numpy()[1 : count + 1] = ends
        self._seq_lens.numpy()[:count] = seq_lens
        read = ends[np.array(plan.samples, np.bool_)] - 1
        if plan.scored_slots:
            read = np.concatenate([read, *self._scored_rows(plan, ends)])
        self._logit_rows.numpy()[: len(read)] = read
        width = -(-int(seq_lens.max()) // rows.block_size)
        mappings, tables = [], []
        for group in self._groups:
            group.slots[:total] = group.table[owner, block].astype(np.int64) * rows.block_size + offset
            group.blocks[: count * width].reshape(count, width)[:] = group.table[slots, :width]
            mappings.append(group.slot_mapping[:total])
            tables.append(group.block_tables[: count * width].view(count, width))
        return ForwardBatch(
            input_ids=self._input_ids[:total],
            positions=self._positions[:total],
            slot_mapping=tuple(mappings),
            query_start=self._query_start[: count + 1],
            seq_lens=self._seq_lens[:count],
            block_tables=tuple(tables),
            logit_rows=self._logit_rows[: len(read)],
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
