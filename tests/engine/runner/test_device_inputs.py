"""What a device finds of a step, however late it is, against lists: ids of known and of late tokens, tables updated by
difference, parameters of draws, padding."""

from random import Random

import numpy as np
import pytest
import torch
from late_device import LateDevice

from engine.messages import NewRow, StepPlan
from engine.runner.device_inputs import DeviceInputs, DeviceStep
from engine.runner.request_rows import IN_FLIGHT, RequestRows
from engine.runner.sampling.parameters import SamplingColumns
from engine.runner.staging import DeviceStaging
from engine.sampling_params import SamplingParams

SLOTS, WINDOW, SIZE, VOCAB = 5, 40, 4, 100
CPU = torch.device("cpu")


class World:
    """Rows that come, grow and go at random, and a device that is told of the differences only."""

    def __init__(self, seed: int, groups: int) -> None:
        self.random, self.device = Random(seed), LateDevice(seed)
        self.rows, self.columns = RequestRows(SLOTS, WINDOW, SIZE, groups), SamplingColumns(SLOTS, VOCAB, ())
        self.inputs = DeviceInputs(self.rows, self.columns, VOCAB, 64, CPU, self.device)
        self.drawn = dict.fromkeys(range(SLOTS), 0)
        self.seen = 0

    def plan(self) -> StepPlan:
        """Each slot's row: new, or one token more, or not in it."""
        r, rows = self.random, self.rows
        new_rows, new_blocks, freed, counts = [], [], [], {}
        for slot in r.sample(range(SLOTS), r.randrange(1, SLOTS + 1)):
            if rows.lengths[slot] == 0 or rows.lengths[slot] > WINDOW - 2 or r.random() < 0.15:
                freed.append(slot)
                length = r.randrange(1, 12)
                computed, end = r.randrange(length), -(-length // SIZE)
                blocks = [r.sample(range(1000), end) for _ in rows.block_tables]
                params = SamplingParams(
                    temperature=r.choice([0.0, 0.5, 1.5]), top_k=r.choice([0, 7]), top_p=r.choice([1.0, 0.25]),
                    min_p=r.choice([0.0, 0.5]), seed=r.choice([-1, 0, 2**62]),
                )  # fmt: skip
                ids = r.choices(range(VOCAB), k=length)
                new_rows.append(NewRow(slot, f"r{slot}", ids, length, params, r.randrange(3), blocks, computed))
                counts[slot] = length - computed
            else:
                if rows.num_computed[slot] == rows.num_blocks[slot] * SIZE:
                    new_blocks.append((slot, [[r.randrange(1000)] for _ in rows.block_tables]))
                counts[slot] = 1
        slots = sorted(counts, key=lambda slot: counts[slot] != 1)
        empty = {"copies": [], "transfers": []}
        return StepPlan(
            1, slots, [counts[slot] for slot in slots], [True] * len(slots), new_rows, new_blocks, freed_slots=freed,
            **empty,
        )  # fmt: skip

    def step(self, padded: bool) -> None:
        """One step, and a check on the device of what it reads there, whenever that is."""
        plan, rows = self.plan(), self.rows
        for slot in plan.freed_slots:
            rows.release(slot)
        for row in plan.new_rows:
            rows.admit(row, VOCAB)
            self.columns.admit(row)
        for slot, ids in plan.new_blocks:
            rows.append_blocks(slot, ids)
        fits = padded and max(plan.num_tokens) == 1
        staged = self.inputs.stage(plan, SLOTS if fits else None)
        self.device.launch(self.checking(staged, self.expected(plan), fits))
        late = [slot for slot in plan.slots if self.random.random() < 0.5]
        rows.num_computed[plan.slots] += plan.num_tokens
        for slot in plan.slots:
            if slot in late:
                rows.expect_tokens(np.array([slot]))
            else:
                rows.append_tokens(np.array([slot]), np.array([self.drawn[slot]]))

    def expected(self, plan: StepPlan) -> dict[str, object]:
        """Lists, made while the host stands where the step does."""
        rows, columns, ids, positions, mappings = self.rows, self.columns, [], [], [[] for _ in self.rows.block_tables]
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            for position in range(rows.num_computed[slot], rows.num_computed[slot] + count):
                token = int(rows.token_ids[slot, position])
                ids.append(self.drawn[slot] if token == IN_FLIGHT else token)
                positions.append(position)
                for mapping, table in zip(mappings, rows.block_tables, strict=True):
                    mapping.append(int(table[slot, position // SIZE]) * SIZE + position % SIZE)
        lens = [int(rows.num_computed[slot]) + count for slot, count in zip(plan.slots, plan.num_tokens, strict=True)]
        ends = np.cumsum(plan.num_tokens).tolist()
        drawn = {slot: self.random.choice([-1, 3, VOCAB - 1]) for slot in plan.slots}
        self.drawn |= {slot: max(0, token) for slot, token in drawn.items()}
        return {
            "ids": ids, "positions": positions, "mappings": mappings, "lens": lens, "starts": [0, *ends],
            "read": [end - 1 for end in ends], "drawn": list(drawn.values()),
            "tables": [[table[slot, : -(-n // SIZE)].tolist() for slot, n in zip(plan.slots, lens, strict=True)]
                       for table in rows.block_tables],
            "temperature": [0.0 if columns.greedy[slot] else columns.temperature[slot] for slot in plan.slots],
            **{name: [getattr(columns, name)[slot] for slot in plan.slots] for name in ("top_k", "top_p", "min_p")},
            "seeds": [int(columns.seed[slot].astype(np.int64)) for slot in plan.slots],
            "choices": [int(columns.index[slot]) for slot in plan.slots],
        }  # fmt: skip

    def checking(self, staged: DeviceStep, wanted: dict[str, object], is_sized: bool):
        def check() -> None:
            batch, draw = self.inputs.batch(staged), staged.draw
            count = SLOTS if is_sized else len(wanted["lens"])
            pads = count - len(wanted["lens"])
            assert batch.input_ids.tolist() == wanted["ids"] + [0] * pads
            assert batch.positions.tolist() == wanted["positions"] + [0] * pads
            for found, mapping in zip(batch.slot_mapping, wanted["mappings"], strict=True):
                assert found.tolist() == mapping + [-1] * pads
            assert not is_sized or batch.block_tables[0].shape[1] == self.rows.block_tables.shape[2]
            assert batch.seq_lens.tolist() == wanted["lens"] + [0] * pads
            longest = batch.block_tables[0].shape[1] * SIZE
            assert batch.lengths.contexts.tolist() == ([longest] * count if is_sized else wanted["lens"])
            assert batch.lengths.rows.tolist() == batch.query_start.diff().tolist()
            starts = wanted["starts"]
            assert batch.query_start.tolist() == starts + [starts[-1] + 1 + pad for pad in range(pads)]
            assert batch.logit_rows.tolist() == wanted["read"] + list(range(len(wanted["read"]), count))
            for found, tables in zip(batch.block_tables, wanted["tables"], strict=True):
                assert found.dtype is torch.int32 and found.stride(1) == 1 and len(found) == count
                for row, table in zip(found.tolist(), tables, strict=False):
                    assert row[: len(table)] == table
                assert not found[len(tables) :].any()
            fills = {"top_p": 1.0}
            for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "choices"):
                assert getattr(draw, name).tolist() == wanted[name] + [fills.get(name, 0)] * pads, name
            assert draw.positions.tolist() == wanted["lens"] + [0] * pads
            self.inputs.keep(staged, torch.tensor(wanted["drawn"] + [-1] * pads))
            self.seen += 1

        return check


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_late_device_finds_what_the_host_meant(seed: int, groups: int) -> None:
    world = World(seed, groups)
    for step in range(30):
        world.step(padded=step % 3 == 0)
    world.device.catch_up()
    assert world.seen == 30 and world.device.num_sends == 30


def test_steps_of_one_size_lie_at_one_place() -> None:
    """Whatever is in them, and whatever was staged between."""
    world = World(1, 2)
    for slot in range(SLOTS):
        row = NewRow(slot, "r", [1], 1, SamplingParams(), 0, [[slot + 1]] * 2, 0)
        world.rows.admit(row, VOCAB)
    found = {}
    for size, count in ((4, 0), (2, 2), (4, 3), (4, 4), (2, 1), (5, 5), (4, 1)):
        plan = StepPlan(1, list(range(count)), [1] * count, [True] * count, [], [], [], [], [])
        step = world.inputs.stage(plan, size)
        arrays = step.places, step.positions, *step.slot_mapping, step.logit_rows, step.query_start, step.seq_lens
        draw = step.draw
        arrays += step.slots, step.drawing_slots, draw.temperature, draw.top_k, draw.top_p, draw.min_p
        arrays += draw.seeds, draw.choices, draw.positions
        places = [(x.data_ptr(), x.shape) for x in arrays]
        assert found.setdefault(size, places) == places and step.width == WINDOW // SIZE
        assert all(place % 64 == world.inputs._staging._int64.data_ptr() % 64 for place, _ in places)
    assert len(found) == 3


def test_the_host_waits_for_the_copy_of_two_steps_before_and_for_no_more() -> None:
    device = LateDevice()
    staging = DeviceStaging(16, 1, CPU, device)
    read = []
    for step in range(5):
        staging.begin()
        x = staging.int64(np.array([step]))
        staging.send()
        device.launch(lambda x=x: read.append(x.item()))
        assert len(read) == max(0, step - 2), "a step is done when the copy behind it has been waited for"
    device.catch_up()
    assert read == list(range(5))


def test_the_largest_step_fits() -> None:
    rows, device = RequestRows(3, 33, 2, 3), LateDevice()
    inputs = DeviceInputs(rows, SamplingColumns(3, VOCAB, ()), VOCAB, 99, CPU, device)
    new = [NewRow(slot, "r", list(range(33)), 33, SamplingParams(), 0, [list(range(17))] * 3, 0) for slot in range(3)]
    for row in new:
        rows.admit(row, VOCAB)
    step = inputs.stage(StepPlan(1, [0, 1, 2], [33] * 3, [True] * 3, new, [], [], [], [], scored_slots=[0, 1, 2]))
    device.catch_up()
    batch = inputs.batch(step)
    assert batch.block_tables[2].tolist() == [list(range(17))] * 3 and batch.logit_rows.shape == (3 + 3 * 32,)
    assert batch.input_ids.tolist() == list(range(33)) * 3
