"""The warm-up does, once, all that steps may ever do, in all sizes, and leaves nothing behind."""

from dataclasses import replace

import pytest
import static_kernels
import tiny_models
import torch
from engines import Engine, Loaded
from late_device import LateDevice

from engine.messages import StepPlan
from engine.runner.warm_up import RATIO, warm_up
from kernels.triton.linear import TILES, tile_of

INT8 = {"kv_cache_dtype": "int8", "kv_refresh_interval": 3}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.load(tiny_models.build(tmp_path_factory.mktemp("tiny")), torch.float32, 128)


def warmed(engine: Engine, largest: bool) -> list[StepPlan]:
    """Every step that was run."""
    executor, plans = engine.executor, []
    forward = executor.forward
    executor.forward = lambda plan: plans.append(plan) or forward(plan)
    warm_up(executor, largest)
    executor.forward = forward
    return plans


@pytest.mark.parametrize(("sequences", "tokens", "num_blocks"), [(6, 100, 64), (6, 100, 5), (1, 40, 64)])
def test_from_as_large_as_a_step_may_be_down_to_one_token(sequences, tokens, num_blocks, loaded: Loaded) -> None:
    engine = Engine(loaded, max_num_seqs=sequences, chunk=tokens, num_blocks=num_blocks)
    plans = warmed(engine, largest=True)
    runner, count = engine.executor.runner, min(sequences, num_blocks)
    length = min(tokens // count, num_blocks // count * 16 - 1)
    assert (len(plans[0].slots), plans[0].total_tokens) == (count, count * length)
    sizes = [plan.total_tokens for plan in plans if plan.new_rows]
    assert sizes[-1] == 1 and sizes[0] == max(sizes)
    decodes = {len(plan.slots) for plan in plans if plan.slots and not plan.new_rows}
    assert {1, count} <= decodes
    assert not runner.pools[0].any() and not runner.rows.lengths.any() and not runner.rows.faults


@pytest.mark.parametrize("outputs", [576, 1024, 3072, 4096, 6144, 28672, 151936])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_finds_every_tile_of_a_linear_layer(outputs: int, parts: int) -> None:
    """One that no size of the warm-up has would be compiled amid somebody's request."""
    most = sizes = 8192

    def tile(rows: int) -> object:
        return tile_of.__wrapped__(rows, outputs, parts, 256 * 128, 227 << 10)

    warm = set()
    while sizes:
        warm.add(tile(sizes))
        sizes = int(sizes / RATIO)
    assert {tile(rows) for rows in range(1, most + 1, 8)} <= warm and len(warm) >= 3
    assert TILES[0] in {tile for tile, _ in warm}


def test_a_refresh_leaves_nothing_behind_either(loaded: Loaded) -> None:
    """In more blocks than the prompts of a small pool have."""
    engine = Engine(replace(loaded, kv=INT8), chunk=64, block_size=4, num_blocks=10)
    plans = warmed(engine, largest=False)
    blocks = [sum(len(row.block_ids[0]) for row in plan.new_rows) for plan in plans if plan.new_rows]
    assert blocks == [10, 8] and not engine.executor.runner.pools[0].any()


@pytest.mark.parametrize("link", [None, LateDevice], ids=["CPU", "late device"])
def test_does_all_that_steps_do(link, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of every kind, copies of blocks, and refreshes where they are asked for."""
    engine = Engine(replace(loaded, kv=INT8), link=link and link())
    runner = engine.executor.runner
    if link is not None:
        monkeypatch.setattr("kernels.ops.draw", static_kernels.draw)
    plans = warmed(engine, largest=True)
    if link is not None:
        engine.executor.link.catch_up()
    refreshed = [plan.total_tokens for plan in plans if plan.refreshed_slots]
    assert {1, 126} <= set(refreshed) and all(plan.copies for plan in plans if plan.slots and not plan.new_rows)
    kinds = {row.params for plan in plans for row in plan.new_rows}
    assert {(each.temperature, each.logprobs) for each in kinds} == {(0.0, None), (1.0, None), (1.0, 1)}
    assert not runner.pools[0].any() and not runner.rows.lengths.any()
    assert engine.executor.sampler.columns.plain.all()


def test_of_a_cpu_is_one_step_of_prompts_and_one_that_decodes(loaded: Loaded) -> None:
    plans = warmed(Engine(loaded), largest=False)
    assert [(len(plan.slots), plan.total_tokens) for plan in plans if plan.slots] == [(8, 256), (8, 8)]
