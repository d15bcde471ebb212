"""StepPlan to arrays by numpy gathers from the rows, and on the CPU to the `ForwardBatch` itself.

A step's tensors are views of one buffer (`staging`): they are valid until the next `build`. `device_inputs` makes the
batches of other devices.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.messages import StepPlan
from engine.model.interface import ForwardBatch
from engine.runner.request_rows import RequestRows, Slots
from engine.runner.staging import HostStaging

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepArrays:
    """T tokens of B sequences. Where no shape is said otherwise: `ForwardBatch`'s, in int64."""

    slots: Slots
    """[B]"""
    owners: Slots
    """[T]: the slot of each token"""
    input_ids: Ints
    """Negative: still to come (`request_rows.IN_FLIGHT`)."""
    positions: Ints
    slot_mapping: list[Ints]
    query_start: Ints
    seq_lens: Ints
    samples: npt.NDArray[np.bool_]
    """[B]"""
    logit_rows: Ints


class Arranger:
    """`arrange` costs tens of microseconds: nothing in it loops over rows in Python."""

    def __init__(self, rows: RequestRows, max_num_batched_tokens: int) -> None:
        self.rows = rows
        self.max_tokens = max(max_num_batched_tokens, rows.max_num_seqs)
        self.arange = np.arange(self.max_tokens + 1, dtype=np.int64)

    def arrange(self, plan: StepPlan) -> StepArrays:
        """Gathers the plan's tokens. Does not change the rows."""
        rows, count = self.rows, len(plan.slots)
        slots = np.array(plan.slots, np.int64)
        computed = rows.num_computed[slots]
        starts_and_ends = self.arange[: count + 1]
        if max(plan.num_tokens, default=1) == 1:
            owners, positions, seq_lens = slots, computed, computed + 1
        else:
            num_tokens = np.array(plan.num_tokens, np.int64)
            starts_and_ends = np.concatenate([starts_and_ends[:1], num_tokens.cumsum()])
            owners, seq_lens = slots.repeat(num_tokens), computed + num_tokens
            positions = self.arange[: len(owners)] + (computed - starts_and_ends[:-1]).repeat(num_tokens)
        ends, samples = starts_and_ends[1:], np.array(plan.samples, np.bool_)
        read = ends[samples] - 1
        if plan.scored_slots:
            read = np.concatenate([read, *self._scored_rows(plan, ends)])
        block, offset = np.divmod(positions, rows.block_size)
        mapping = [table[owners, block].astype(np.int64) * rows.block_size + offset for table in rows.block_tables]
        ids = rows.token_ids[owners, positions].astype(np.int64)
        return StepArrays(slots, owners, ids, positions, mapping, starts_and_ends, seq_lens, samples, read)

    def _scored_rows(self, plan: StepPlan, ends: Ints) -> list[Ints]:
        """For each of `plan.scored_slots`: its rows that a prompt token follows."""
        rows = []
        for slot in plan.scored_slots:
            place = plan.slots.index(slot)
            tokens = plan.num_tokens[place]
            start = int(ends[place]) - tokens
            behind = int(self.rows.num_prompt[slot]) - 1 - int(self.rows.num_computed[slot])
            rows.append(self.arange[start : start + min(tokens, behind)])
        return rows


class BatchBuilder:
    """Batches on the CPU."""

    def __init__(self, rows: RequestRows, max_num_batched_tokens: int) -> None:
        self.rows = rows
        self._arranger = Arranger(rows, max_num_batched_tokens)
        self._tokens = self._arranger.max_tokens + 2
        groups, sequences = len(rows.block_tables), rows.max_num_seqs
        halves = [sequences + 1, sequences, *[table.size for table in rows.block_tables]]
        self._staging = HostStaging([self._tokens] * (3 + groups) + [-(-count // 2) for count in halves])

    def build(self, plan: StepPlan) -> ForwardBatch:
        """Gathers the plan's tokens, at least one. Does not change the rows."""
        rows, staging, arrays = self.rows, self._staging, self._arranger.arrange(plan)
        width = -(-int(arrays.seq_lens.max()) // rows.block_size)
        staging.begin()
        return ForwardBatch(
            input_ids=staging.int64(arrays.input_ids),
            positions=staging.int64(arrays.positions),
            slot_mapping=tuple(map(staging.int64, arrays.slot_mapping)),
            logit_rows=staging.int64(arrays.logit_rows),
            query_start=staging.int32(arrays.query_start),
            seq_lens=staging.int32(arrays.seq_lens),
            block_tables=tuple(
                staging.table(table[arrays.slots, :width], table.shape[1]) for table in rows.block_tables
            ),
        )

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
