"""Decode steps that run again without Python: recorded at the first step of as many rows, replayed from then on.

A small model's decode step is hundreds of short kernels, and calling each from Python costs more than some of them
take. Steps of B sequences with one token each differ in numbers only, and those lie where `prepare` put the last ones.

Only whole steps of one token a sequence, all of them sampled, through the ordinary attention are recorded; and only on
a CPU with native kernels, of models in code of Octavo's own. Everything else runs as it is written.
"""

import logging

import torch

from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from kernels.cpu.program import Arena, NotRecordable, Program, record

log = logging.getLogger(__name__)

MOST_ROWS = 64
"""Of a recorded step. With more, kernels take so much longer than the calls that nothing is gained."""


class DecodeGraphs:
    """The hidden states of steps, recorded where that is possible."""

    def __init__(self, model: CausalLM, attention: AttentionBackend) -> None:
        self.model, self.attention = model, attention
        self._arena = Arena()
        self._recorded: dict[int, tuple[Program, torch.Tensor, list[int]]] = {}
        """By rows: the program, where it puts the hidden states, and where it expects the batch."""
        self._may_record = True

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """`CausalLM.hidden` of the batch through the attention: the same bits. Valid until the next call."""
        rows = len(batch.input_ids)
        whole = rows == len(batch.seq_lens) == len(batch.logit_rows)
        if not whole or rows > MOST_ROWS or not self._may_record:
            return self.model.hidden(batch, self.attention)
        if rows not in self._recorded:
            return self._record(batch)
        program, hidden, places = self._recorded[rows]
        assert places == _places(batch), "a batch lies elsewhere than the one that was recorded"
        program.run()
        return hidden

    def _record(self, batch: ForwardBatch) -> torch.Tensor:
        try:
            program, hidden = record(lambda: self.model.hidden(batch, self.attention), self._arena)
        except NotRecordable as reason:
            log.debug("decode steps are not recorded: %s", reason)
            self._may_record = False
            return self.model.hidden(batch, self.attention)
        self._recorded[len(batch.input_ids)] = program, hidden, _places(batch)
        return hidden


def _places(batch: ForwardBatch) -> list[int]:
    tensors = batch.input_ids, batch.positions, *batch.slot_mapping, batch.query_start, batch.seq_lens
    return [x.data_ptr() for x in (*tensors, *batch.block_tables, batch.logit_rows)]
