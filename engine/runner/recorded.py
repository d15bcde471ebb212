"""A model's steps without Python: noted down once, run from C++ from then on (`kernels.cpu.program`).

It holds for every step on a CPU with native kernels, of models in code of Octavo's own, prompts and decoding alike. Any
other model runs as it is written.
"""

import logging
from dataclasses import dataclass

import torch

from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from kernels.cpu.program import Arena, NotRecordable, Program, record

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recorded:
    """A model with one attention."""

    program: Program
    hidden: torch.Tensor
    """Where runs put what the head reads."""
    places: list[int]
    """Addresses of the arrays of a batch."""


class RecordedModel:
    """`CausalLM.hidden` of a model, recorded for each attention that it is asked with, if that can be."""

    def __init__(self, model: CausalLM, largest: ForwardBatch) -> None:
        """largest: `BatchBuilder.largest()` of the builder of all batches to come."""
        self.model, self._largest = model, largest
        self._arena = Arena()
        self._recorded: dict[AttentionBackend, Recorded | None] = {}

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """What the head reads, [S, hidden_size], in the model's own bits. Valid until the next call."""
        if attention not in self._recorded:
            self._recorded[attention] = self._record(attention)
        recorded = self._recorded[attention]
        if recorded is None:
            return self.model.hidden(batch, attention)
        here = all(place == x.data_ptr() for place, x in zip(recorded.places, _arrays(batch), strict=True) if len(x))
        assert here, "a batch lies elsewhere than the one that was recorded"
        recorded.program.run(_sizes(batch))
        return recorded.hidden[: len(batch.logit_rows)]

    def _record(self, attention: AttentionBackend) -> Recorded | None:
        largest = self._largest
        try:
            program, hidden = record(lambda: self.model.hidden(largest, attention), self._arena, _sizes(largest))
        except NotRecordable as reason:
            log.debug("steps are not recorded: %s", reason)
            return None
        return Recorded(program, hidden, [x.data_ptr() for x in _arrays(largest)])


def _sizes(batch: ForwardBatch) -> tuple[int, int, int]:
    """Tokens, rows that the head reads, sequences."""
    return len(batch.input_ids), len(batch.logit_rows), len(batch.seq_lens)


def _arrays(batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    rows = batch.input_ids, batch.positions, *batch.slot_mapping, batch.logit_rows
    return (*rows, batch.query_start, batch.seq_lens, *batch.block_tables)
