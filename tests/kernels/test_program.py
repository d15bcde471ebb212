"""Recorded native calls: made again, they give what they would give if they were called; nothing else is recorded."""

from collections.abc import Callable

import pytest
import torch

from kernels import ops
from kernels.cpu import library
from kernels.cpu.program import Arena, NotRecordable, fresh, record

WIDTH = 64
KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _library() -> None:
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")


def layer(table: torch.Tensor, indices: torch.Tensor) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    norm = torch.ones(WIDTH, dtype=table.dtype)
    packed = ops.pack_linear((torch.randn(WIDTH, WIDTH, generator=generator) / 8).to(table.dtype))

    def step() -> torch.Tensor:
        residual = ops.gather_rows(table, indices)
        x = ops.rms_norm(residual, norm, 1e-5)
        for _ in range(6):
            x = ops.add_rms_norm(ops.linear(x, packed), residual, norm, 1e-5)
        return x

    return step


@KINDS
@torch.inference_mode()
def test_a_program_computes_from_the_numbers_as_they_are_now(dtype: torch.dtype) -> None:
    table, indices = (
        torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype),
        torch.tensor([4, 1, 7]),
    )
    step = layer(table, indices)
    expected = step()
    program, result = record(step, Arena())
    assert torch.equal(result, expected)
    for rows in ([0, 1, 2], [8, 8, 3]):
        indices.copy_(torch.tensor(rows))
        table.neg_()
        expected = step()
        assert not torch.equal(result, expected)
        program.run()
        assert torch.equal(result, expected)


@torch.inference_mode()
def test_programs_of_one_arena_run_in_any_order() -> None:
    table, arena = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(0)), Arena()
    steps = [layer(table, torch.arange(rows)) for rows in (2, 9, 1, 5)]
    recorded = [record(step, arena) for step in steps]
    for place in (1, 0, 3, 2, 1):
        program, result = recorded[place]
        program.run()
        assert torch.equal(result, steps[place]())


@pytest.mark.parametrize(("keeps", "places"), [(False, 1), (True, 20)])
@torch.inference_mode()
def test_memory_of_what_is_gone_is_given_out_again(keeps: bool, places: int) -> None:
    table, indices = torch.arange(20.0)[:, None].repeat(1, 5), torch.arange(20).split(1)
    arena, kept, found = Arena(), [], set()

    def step() -> None:
        for index in indices:
            row = ops.gather_rows(table, index)
            found.add(row.data_ptr())
            kept.extend([row.view(5)] if keeps else [])
            del row

    record(step, arena)
    assert len(found) == places and all(place % 64 == 0 for place in found)
    assert [row.tolist() for row in kept] == [[float(number)] * 5 for number in range(20)] * keeps


@pytest.mark.parametrize(
    "foreign",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.T.contiguous(),
        lambda x: x.float(),
        lambda x: x.sum().item(),
        lambda x: torch.zeros(3),
        lambda x: x[torch.tensor([0])],
    ],
)
@torch.inference_mode()
def test_what_torch_computes_is_refused(foreign: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(NotRecordable, match="computed by torch"):
        record(lambda: foreign(x), Arena())


@torch.inference_mode()
def test_views_are_not_refused_and_nothing_is_noted_behind_the_end() -> None:
    x, arena = torch.arange(8.0).view(2, 4), Arena()
    program, (first, second) = record(lambda: x.split([1, 3], dim=1), arena)
    ops.rms_norm(x, torch.ones(4), 1e-5)
    x += 1
    program.run()
    assert first.tolist() == [[1.0], [5.0]] and second.shape == (2, 3)


@torch.inference_mode()
def test_a_step_that_fails_leaves_no_recording_behind() -> None:
    def fails() -> None:
        fresh((2, 2), torch.float32)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        record(fails, Arena())
    x = torch.ones(2, 4)
    assert ops.rms_norm(x, torch.ones(4), 1e-5).shape == (2, 4)  # torch.empty is refused while one records
