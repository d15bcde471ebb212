"""Which steps are launched whole, and what a captured step reads."""

import pytest
import torch
from late_device import LateDevice

from configs.graphs import LARGEST, decode_sizes
from engine.messages import StepPlan
from engine.runner.graphs import DecodeGraphs


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 100, 128, 256, 300, 512, 513, 4096])
def test_sizes(most: int) -> None:
    sizes = decode_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == min(most, LARGEST)
    for count in range(1, min(most, LARGEST) + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= (15 if count > 256 else 7)
    assert len(decode_sizes(256)) == 35 and len(sizes) <= 51


def plan_of(counts: list[int], samples: bool = True, **more: object) -> StepPlan:
    slots = list(range(len(counts)))
    return StepPlan(1, slots, counts, [samples] * len(slots), [], [], [], [], [], **more)


def test_decode_steps_are_padded_to_the_next_size_and_others_are_not_captured() -> None:
    device = LateDevice()
    graphs, captured = DecodeGraphs(device), []
    assert graphs.size_for(plan_of([1])) is None, "nothing is captured"
    graphs.capture([1, 2, 4, 6], lambda size: lambda: captured.append(size))
    assert captured == [6, 6, 4, 4, 2, 2, 1, 1], "the largest first, each once to warm up"
    assert [graphs.size_for(plan_of([1] * count)) for count in range(1, 8)] == [1, 2, 4, 4, 6, 6, None]
    for other in (plan_of([1, 2]), plan_of([1], samples=False), plan_of([1], scored_slots=[0])):
        assert graphs.size_for(other) is None
    assert str(graphs).startswith("4 sizes up to 6 sequences, captured in 0.")


def test_a_replay_reads_the_same_memory_and_runs_no_python() -> None:
    device, x, out = LateDevice(), torch.ones(3), torch.zeros(3)
    python = {"factor": 2.0, "x": x}

    def work() -> None:
        out.copy_((python["x"] * python["factor"]).view(3) + 1)

    replay = device.capture(work)
    python["factor"], python["x"] = 9.0, torch.full((3,), 100.0)
    x.fill_(5.0)
    replay()
    assert out.tolist() == [3.0] * 3, "not yet"
    device.catch_up()
    assert out.tolist() == [11.0] * 3


def test_a_capture_refuses_to_ask_the_device() -> None:
    for work in (lambda: torch.ones(1).item(), lambda: torch.ones(3)[torch.ones(3) > 0]):
        with pytest.raises(AssertionError, match="while it was captured"):
            LateDevice().capture(work)
