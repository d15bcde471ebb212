"""Recorded native calls: run, they give what they would give if they were called; nothing else can be recorded."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels import ops
from kernels.cpu import library
from kernels.cpu.program import Arena, NotRecordable, fresh, record

WIDTH, MOST = 64, 9
KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _library() -> None:
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")


def random_table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(MOST, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def step_of(table: torch.Tensor, seed: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    """int64 [T] -> [T, WIDTH], by nearly all kinds of calls."""
    norm = torch.ones(WIDTH, dtype=table.dtype)
    weight = torch.randn(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / 8
    packed, halved = ops.pack_linear(weight.to(table.dtype)), ops.pack_linear(weight.to(table.dtype), None, "silu")

    def step(indices: torch.Tensor) -> torch.Tensor:
        residual = ops.gather_rows(table, indices)
        x = ops.rms_norm(residual, norm, 1e-5)
        for _ in range(3):
            first, second = ops.linear(x, packed).split(WIDTH, dim=-1)
            x = ops.add_rms_norm(second, residual, norm, 1e-5)
            x = ops.add_rms_norm(ops.linear(first, halved), x, norm, 1e-5)
        return x

    return step


@KINDS
@torch.inference_mode()
def test_a_program_computes_from_the_rows_and_numbers_of_the_day(dtype: torch.dtype) -> None:
    table, indices = random_table(dtype), torch.zeros(MOST, dtype=torch.int64)
    step = step_of(table)
    program, result = record(lambda: step(indices), Arena(), (MOST,))
    for rows in ([4, 1, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8], [8], [8, 8], []):
        indices[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        table.neg_()
        expected = step(indices[: len(rows)])
        result.fill_(torch.nan)
        program.run((len(rows),))
        assert torch.equal(result[: len(rows)], expected)
        assert result[len(rows) :].isnan().all()


@KINDS
@torch.inference_mode()
def test_norms_and_rotary_in_place_are_recorded(dtype: torch.dtype) -> None:
    """Each run turns what the calls before it have written anew."""
    table, norm = random_table(dtype), torch.full((16,), 0.5, dtype=dtype)
    indices, angles = torch.arange(MOST), torch.rand(MOST, 8)

    def step(indices: torch.Tensor) -> torch.Tensor:
        fused = ops.gather_rows(table, indices)
        q, k = fused[:, :32].unflatten(1, (2, 16)), fused[:, 32:48].unflatten(1, (1, 16))
        ops.norm_rotary(q, k, norm, norm, 1e-6, indices, angles, angles)
        return fused

    program, result = record(lambda: step(indices), Arena(), (MOST,))
    for rows in (MOST, 3, 3):
        expected = step(indices[:rows])
        assert not torch.equal(expected, table[:rows])
        program.run((rows,))
        assert torch.equal(result[:rows], expected)


@torch.inference_mode()
def test_each_call_has_rows_of_its_own_kind() -> None:
    table, first, second = random_table(), torch.arange(7), torch.arange(3)
    program, (a, b) = record(lambda: (ops.gather_rows(table, first), ops.gather_rows(table, second)), Arena(), (7, 3))
    a.zero_(), b.zero_()
    program.run((2, 3))
    assert a.any(1).tolist() == [True] * 2 + [False] * 5 and b.any(1).all()
    with pytest.raises(NotRecordable, match="GatherRowsCall has 3 rows"):
        record(lambda: ops.gather_rows(table, second), Arena(), (7, 4))


@torch.inference_mode()
def test_programs_of_one_arena_run_in_any_order() -> None:
    table, arena = random_table(), Arena()
    indices = torch.arange(MOST)
    steps = [step_of(table, seed) for seed in range(3)]
    recorded = [record(lambda step=step: step(indices), arena, (MOST,)) for step in steps]
    for place, rows in ((1, 2), (0, 9), (2, 1), (1, 5), (0, 4)):
        program, result = recorded[place]
        program.run((rows,))
        assert torch.equal(result[:rows], steps[place](indices[:rows]))


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

    program, _ = record(step, arena, (1,))
    program.run((1,))
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
        lambda x: torch.tensor([0.5]),
        lambda x: torch.as_tensor([1, 2]),
        lambda x: x.new_tensor(3.0),
        lambda x: torch.from_numpy(np.ones(3)),
    ],
)
@torch.inference_mode()
def test_what_torch_computes_is_refused_and_not_done(foreign: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with pytest.raises(NotRecordable, match="computed by torch"):
        record(lambda: foreign(x), Arena(), (2,))
    assert (x == 1).all()


@torch.inference_mode()
def test_nothing_is_computed_while_recording_and_nothing_noted_behind_the_end() -> None:
    x, norm, indices = torch.ones(2, 4), torch.ones(4), torch.tensor([1, 0])
    program, (first, second) = record(lambda: ops.gather_rows(x, indices).split([1, 3], dim=1), Arena(), (2,))
    second.zero_()
    ops.add_rms_norm(x, x, norm, 1e-5)
    assert (x == 2).all() and not second.any()
    program.run((2,))
    assert first.tolist() == [[2.0], [2.0]] and second.tolist() == [[2.0] * 3] * 2 and (x == 2).all()


@torch.inference_mode()
def test_a_step_that_fails_leaves_no_recording_behind() -> None:
    def fails() -> None:
        fresh((2, 2), torch.float32)
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        record(fails, Arena(), (2,))
    x = torch.ones(2, 4)
    assert torch.equal(ops.rms_norm(x, torch.ones(4), 0.0), x)
