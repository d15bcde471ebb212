"""What the runner remembers of each running sequence: one row per slot, changed only by difference.

    NewRow ───────┐                            ┌──> prepare.py gathers the step's inputs by slot
    new_blocks ───┼──> columns [max_num_seqs] ─┤
    drawn tokens ─┘                            └──> sampling reads lengths and tails

Drawn tokens are appended here first, so the next step's input ids come from these rows whether or not the scheduler
has seen the result yet: that is what makes a late `StepResult` harmless. Where the host runs ahead of a device that
draws, a token has its place here from the launch of its step on (`expect_tokens`) and comes later (`fill_tokens`).
"""

import numpy as np
import numpy.typing as npt

from engine.messages import NewRow

IN_FLIGHT = -1
"""A token that the device has yet to draw, or that has not arrived."""

Slots = npt.NDArray[np.int64]


class RequestRows:
    """Columns over slots; a slot's values mean something between `admit` and `release` only.

    token_ids     int32 [slots, max_model_len]          prompt and output
    block_tables  int32 [groups, slots, max_blocks]     by KV group: blocks in order
    lengths, num_prompt, num_computed, num_blocks   int64 [slots]
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.block_tables = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.faults: dict[int, str] = {}
        """Slots whose sequence cannot go on, with the reason for the client; the step itself goes on."""

    def admit(self, row: NewRow, vocab_size: int) -> None:
        """Fills a slot. A token id outside the vocabulary makes a fault of this row and is read as token 0."""
        slot, length = row.slot, len(row.token_ids)
        self.release(slot)
        self.append_blocks(slot, row.block_ids)
        ids = np.array(row.token_ids, np.int64)
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            self.faults[slot] = f"token id {ids[outside][0]} is outside the vocabulary (0 to {vocab_size - 1})."
            ids[outside] = 0
        self.token_ids[slot, :length] = ids
        self.lengths[slot] = length
        self.num_prompt[slot] = row.num_prompt_tokens
        self.num_computed[slot] = row.num_computed

    def release(self, slot: int) -> None:
        """Forgets a slot; harmless for one that is empty."""
        self.lengths[slot] = self.num_prompt[slot] = self.num_computed[slot] = self.num_blocks[slot] = 0
        self.faults.pop(slot, None)

    def append_blocks(self, slot: int, block_ids: list[list[int]]) -> None:
        """`block_ids`: by KV group, as many in each."""
        start = self.num_blocks[slot]
        end = start + len(block_ids[0])
        self.block_tables[:, slot, start:end] = block_ids
        self.num_blocks[slot] = end

    def append_tokens(self, slots: Slots, token_ids: npt.NDArray[np.int64]) -> None:
        """One drawn token for each of `slots` (no slot twice)."""
        self.token_ids[slots, self.lengths[slots]] = token_ids
        self.lengths[slots] += 1

    def expect_tokens(self, slots: Slots) -> npt.NDArray[np.int64]:
        """A token will come for each of `slots` (no slot twice). Returns their places in the sequences."""
        places = self.lengths[slots]
        self.append_tokens(slots, np.full(len(slots), IN_FLIGHT))
        return places

    def fill_tokens(self, slots: Slots, places: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Those that came; -1, where there was none to draw, is read as 0."""
        assert (self.token_ids[slots, places] == IN_FLIGHT).all(), "a slot changed hands with a token in flight"
        self.token_ids[slots, places] = np.maximum(token_ids, 0)
