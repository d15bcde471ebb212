"""The batch builder against a list-building reference, under random plans."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import NewRow, StepPlan
from engine.runner.prepare import BatchBuilder
from engine.runner.request_rows import RequestRows
from engine.sampling_params import SamplingParams

NUM_SLOTS, WINDOW, VOCAB = 8, 96, 1000


def plan_of(slots, num_tokens, samples) -> StepPlan:
    return StepPlan(
        step=0,
        slots=slots,
        num_tokens=num_tokens,
        samples=samples,
        new_rows=[],
        new_blocks=[],
        copies=[],
        transfers=[],
        freed_slots=[],
    )


@st.composite
def worlds(draw):
    """Rows in random slots and a plan over some of them, decode rows first."""
    block_size = draw(st.sampled_from([2, 8, 16, 32]))
    num_groups = draw(st.sampled_from([1, 1, 2, 3]))
    rows = RequestRows(NUM_SLOTS, WINDOW, block_size, num_groups)
    sequences = {}
    decode_only = draw(st.booleans())
    for slot in draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True)):
        length = draw(st.integers(1, WINDOW))
        computed = length - 1 if decode_only else draw(st.integers(0, length - 1))
        num_tokens = 1 if decode_only else draw(st.integers(1, length - computed))
        num_blocks = -(-(computed + num_tokens) // block_size)
        ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
        one_group = st.lists(st.integers(0, 2**31 // 32 - 1), min_size=num_blocks, max_size=num_blocks)
        blocks = [draw(one_group) for _ in range(num_groups)]
        first, others = [group[:1] for group in blocks], [group[1:] for group in blocks]
        rows.admit(NewRow(slot, f"r{slot}", ids, 1, SamplingParams(), 0, first, computed), VOCAB)
        rows.append_blocks(slot, others)
        sequences[slot] = (ids, blocks, computed, num_tokens)
    slots = sorted(sequences, key=lambda slot: sequences[slot][3] != 1)
    samples = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    return rows, sequences, plan_of(slots, [sequences[slot][3] for slot in slots], samples)


def check(batch, rows: RequestRows, sequences, plan: StepPlan) -> None:
    ids, positions, starts, lens, logit_rows = [], [], [0], [], []
    mappings: list[list[int]] = [[] for _ in rows.block_tables]
    for slot, samples in zip(plan.slots, plan.samples, strict=True):
        tokens, blocks, computed, num_tokens = sequences[slot]
        for position in range(computed, computed + num_tokens):
            ids.append(tokens[position])
            positions.append(position)
            index, offset = divmod(position, rows.block_size)
            for mapping, group in zip(mappings, blocks, strict=True):
                mapping.append(group[index] * rows.block_size + offset)
        starts.append(len(ids))
        lens.append(computed + num_tokens)
        if samples:
            logit_rows.append(len(ids) - 1)
    for tensor, expected, dtype in (
        (batch.input_ids, ids, torch.int64),
        (batch.positions, positions, torch.int64),
        *((found, mapping, torch.int64) for found, mapping in zip(batch.slot_mapping, mappings, strict=True)),
        (batch.query_start, starts, torch.int32),
        (batch.seq_lens, lens, torch.int32),
        (batch.logit_rows, logit_rows, torch.int64),
    ):
        assert tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.tolist() == expected
    assert len(batch.block_tables) == len(rows.block_tables)
    for group, tables in enumerate(batch.block_tables):
        assert tables.dtype == torch.int32 and tables.stride(1) == 1
        for table, slot in zip(tables.tolist(), plan.slots, strict=True):
            _, blocks, computed, num_tokens = sequences[slot]
            used = -(-(computed + num_tokens) // rows.block_size)
            assert table[:used] == blocks[group][:used]


def builder_of(rows: RequestRows) -> BatchBuilder:
    return BatchBuilder(rows, NUM_SLOTS * WINDOW)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_against_lists(world):
    rows, sequences, plan = world
    before = rows.num_computed.copy()
    check(builder_of(rows).build(plan), rows, sequences, plan)
    assert np.array_equal(rows.num_computed, before)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_buffers_hold_nothing_of_earlier_steps(data):
    """One builder, a large step before the one that is checked."""
    rows, sequences, plan = data.draw(worlds())
    builder = builder_of(rows)
    large = plan_of(list(sequences), [len(sequences[slot][0]) - sequences[slot][2] for slot in sequences], plan.samples)
    builder.build(large)
    check(builder.build(plan), rows, sequences, plan)


def test_on_the_cpu_nothing_is_copied():
    rows = RequestRows(2, 16, 2)
    rows.admit(NewRow(0, "a", [4, 5, 6], 3, SamplingParams(), 0, [[7, 3]], 0), VOCAB)
    builder = builder_of(rows)
    first = builder.build(plan_of([0], [3], [True]))
    second = builder.build(plan_of([0], [2], [True]))
    assert first.input_ids.data_ptr() == second.input_ids.data_ptr()
    assert first.input_ids.tolist() == [4, 5, 6], "the second step wrote the same memory"
    pieces = [first.input_ids, first.positions, *first.slot_mapping, first.query_start, first.seq_lens]
    pieces += [*first.block_tables, first.logit_rows]
    assert len({piece.untyped_storage().data_ptr() for piece in pieces}) == 1
    assert all((piece.data_ptr() - pieces[0].data_ptr()) % 64 == 0 for piece in pieces)


def test_the_largest_step_fits():
    """Every slot full, every token computed, sampled or scored, odd numbers throughout."""
    rows = RequestRows(3, 33, 2, 3)
    for slot in range(3):
        blocks = [list(range(17))] * 3
        rows.admit(NewRow(slot, f"r{slot}", list(range(33)), 33, SamplingParams(), 0, blocks, 0), VOCAB)
    plan = plan_of([0, 1, 2], [33] * 3, [True] * 3)
    plan.scored_slots = [0, 1, 2]
    batch = BatchBuilder(rows, 99).build(plan)
    assert batch.block_tables[2].tolist() == [list(range(17))] * 3 and batch.logit_rows.shape == (3 + 3 * 32,)
    assert batch.input_ids.tolist() == list(range(33)) * 3


def test_a_slot_is_reused_without_traces():
    rows = RequestRows(2, 16, 2)
    rows.admit(NewRow(1, "a", [9] * 16, 16, SamplingParams(), 0, [list(range(8))], 15), VOCAB)
    rows.release(1)
    rows.release(1)
    assert rows.lengths[1] == rows.num_blocks[1] == 0
    rows.admit(NewRow(1, "b", [4, 5, 6], 2, SamplingParams(), 0, [[7]], 1), VOCAB)
    rows.append_blocks(1, [[3]])
    rows.append_tokens(np.array([1]), np.array([8]))
    assert rows.token_ids[1, : rows.lengths[1]].tolist() == [4, 5, 6, 8]
    assert rows.block_tables[0, 1, : rows.num_blocks[1]].tolist() == [7, 3]
    assert rows.num_prompt[1] == 2 and rows.num_computed[1] == 1


def test_a08_a_token_id_outside_the_vocabulary_is_a_fault_of_its_row():
    rows = RequestRows(2, 16, 2)
    for bad in (VOCAB, -1, 2**40):
        rows.admit(NewRow(0, "a", [1, bad, 2], 3, SamplingParams(), 0, [[5]], 0), VOCAB)
        assert str(bad) in rows.faults[0] and rows.token_ids[0, :3].tolist() == [1, 0, 2]
    rows.admit(NewRow(0, "b", [1], 1, SamplingParams(), 0, [[5]], 0), VOCAB)
    assert not rows.faults
