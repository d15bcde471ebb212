"""A step's inputs on a device, in one copy; tables and the tokens just drawn are there already.

    plan ── arrange ──> DeviceStaging ── one copy ──> DeviceStep ─┐
    new blocks ─────────────┘ └─> tables [groups, slots, blocks] ─┼─ gathers ──> ForwardBatch
    what the last step drew ────> tokens [slots] ─────────────────┘

The host runs ahead: a token that the step before has yet to draw is fetched on the device, by its sequence's slot. An
input id therefore travels as a place in `tokens`: behind the slots follow all ids in order, so a known one leads to
itself, and one gather serves both.

A step may be padded to a larger size, so that it fits what was captured (`graphs`): with rows of one token that nobody
stores (slot_mapping -1) of sequences without any (seq_lens 0). They belong to the spare slot, behind all others. What
the host says of such a step holds for all of its size: tables as wide, and contexts as long, as any may be.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import StepPlan
from engine.model.interface import ForwardBatch
from engine.runner.link import Link
from engine.runner.prepare import Arranger, StepArrays
from engine.runner.request_rows import RequestRows
from engine.runner.sampling.parameters import SamplingColumns
from engine.runner.staging import DeviceStaging
from kernels.ops import HostLengths

LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Of the S rows that draw, as `kernels.ops.draw` takes them."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor
    """int64 [S], as seeds and choices: of the token that is drawn"""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views of the device's buffer; shapes as in `ForwardBatch`."""

    places: torch.Tensor
    """int64 [T], in `DeviceInputs.tokens`"""
    positions: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    """Those that draw come first."""
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    """int64 [B]"""
    drawing_slots: torch.Tensor
    """int64 [S]"""
    draw: DrawInputs
    width: int
    """Blocks of the longest sequence."""
    lengths: HostLengths


class DeviceInputs:
    """Made once. `stage` is the host's part of a step and waits for nothing; `batch` and `keep` are work for the
    device."""

    def __init__(
        self,
        rows: RequestRows,
        columns: SamplingColumns,
        vocab_size: int,
        max_num_batched_tokens: int,
        device: torch.device,
        link: Link,
    ) -> None:
        groups, sequences, blocks = rows.block_tables.shape
        assert groups * (sequences + 1) * blocks < 2**31, "places in the tables have 31 bits"
        self.rows, self._columns, self._link = rows, columns, link
        self._arranger = Arranger(rows, max_num_batched_tokens)
        self._spare = sequences
        known = torch.arange(vocab_size, dtype=torch.int64)
        self.tokens = torch.cat([torch.zeros(sequences + 1, dtype=torch.int64), known]).to(device)
        """int64: of each slot the token drawn last; behind them all ids"""
        self.tables = torch.zeros(groups, sequences + 1, blocks, dtype=torch.int32, device=device)
        """Rows of slots, as `RequestRows.block_tables`; of the spare slot: zeros"""
        tokens = self._arranger.max_tokens
        words = tokens * (3 + groups) + (sequences + 1) * 9 + rows.block_tables.size
        self._staging = DeviceStaging(words, 15 + groups, device, link)

    def stage(self, plan: StepPlan, size: int | None = None) -> DeviceStep:
        """Sends the plan's inputs and the blocks that it adds to the rows. Does not change the rows.

        size: of sequences; what the plan has less of them is padded: each of its rows is then one token, and draws.
        """
        arrays, staging, columns = self._arranger.arrange(plan), self._staging, self._columns
        pads = 0 if size is None else size - len(arrays.slots)
        assert size is None or (pads >= 0 and len(arrays.owners) == len(arrays.slots) == len(arrays.logit_rows)), plan
        drawing = arrays.slots[arrays.samples]
        count = len(arrays.slots) + pads

        def padded(values: npt.NDArray[Any], fill: float = 0) -> npt.NDArray[Any]:
            return np.concatenate([values, np.full(pads, fill, values.dtype)]) if pads else values

        starts_and_ends = self._arranger.arange[: count + 1] if pads else arrays.query_start
        most, block_size = self.tables.shape[2], self.rows.block_size
        staging.begin()
        step = DeviceStep(
            places=staging.int64(padded(self._places(arrays), self._spare + 1)),
            positions=staging.int64(padded(arrays.positions)),
            slot_mapping=tuple(staging.int64(padded(mapping, -1)) for mapping in arrays.slot_mapping),
            logit_rows=staging.int64(self._arranger.arange[:count] if pads else arrays.logit_rows),
            query_start=staging.int32(starts_and_ends),
            seq_lens=staging.int32(padded(arrays.seq_lens)),
            slots=staging.int64(padded(arrays.slots, self._spare)),
            drawing_slots=staging.int64(padded(drawing, self._spare)),
            draw=DrawInputs(
                temperature=staging.float32(padded(np.where(columns.greedy[drawing], 0, columns.temperature[drawing]))),
                top_k=staging.int32(padded(columns.top_k[drawing])),
                top_p=staging.float32(padded(columns.top_p[drawing], 1)),
                min_p=staging.float32(padded(columns.min_p[drawing])),
                seeds=staging.int64(padded(columns.seed.view(np.int64)[drawing])),
                choices=staging.int64(padded(columns.index.view(np.int64)[drawing])),
                positions=staging.int64(padded(arrays.seq_lens[arrays.samples])),
            ),
            lengths=HostLengths(
                np.diff(starts_and_ends), np.full(count, most * block_size) if size else arrays.seq_lens
            ),
            width=most if size else -(-int(arrays.seq_lens.max()) // block_size),
        )
        added = self._added_blocks(plan)
        entries = staging.int64(added) if len(added) else None
        staging.send()
        if entries is not None:
            self._link.launch(partial(self._add_blocks, entries))
        return step

    def _places(self, arrays: StepArrays) -> npt.NDArray[np.int64]:
        places = arrays.input_ids + self._spare + 1
        late = arrays.input_ids < 0
        places[late] = arrays.owners[late]
        return places

    def _added_blocks(self, plan: StepPlan) -> npt.NDArray[np.int64]:
        """The rows' new entries: place in `tables` x 2^32 + block."""
        rows, (groups, _, blocks) = self.rows, self.tables.shape
        starts = {slot: int(rows.num_blocks[slot]) - len(ids[0]) for slot, ids in plan.new_blocks}
        starts |= {row.slot: 0 for row in plan.new_rows}
        added = []
        for slot, start in starts.items():
            end = int(rows.num_blocks[slot])
            first = np.arange(groups)[:, None] * (self._spare + 1) * blocks + slot * blocks
            entries = (first + np.arange(start, end)) << 32 | rows.block_tables[:, slot, start:end].astype(np.int64)
            added.append(entries.ravel())
        return np.concatenate(added) if added else np.zeros(0, np.int64)

    @torch.inference_mode()
    def _add_blocks(self, entries: torch.Tensor) -> None:
        self.tables.view(-1).index_copy_(0, entries >> 32, (entries & LOW).int())

    def batch(self, step: DeviceStep) -> ForwardBatch:
        """What the model reads."""
        tables = self.tables[:, :, : step.width].index_select(1, step.slots)
        return ForwardBatch(
            input_ids=self.tokens.index_select(0, step.places),
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            query_start=step.query_start,
            seq_lens=step.seq_lens,
            block_tables=tuple(tables.unbind(0)),
            logit_rows=step.logit_rows,
            lengths=step.lengths,
        )

    def keep(self, step: DeviceStep, drawn: torch.Tensor) -> None:
        """drawn: int64 [S], the next inputs of their sequences; -1, where there is none, is read as 0."""
        self.tokens.index_copy_(0, step.drawing_slots, drawn.clamp(min=0))
