"""Recorded steps: the bits of the model's own, whoever is in a step and with how many tokens."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from engines import Loaded

from configs.kv import KVLayout
from configs.limits import SchedulerLimits
from engine.messages import NewRow, StepPlan
from engine.model.base import CausalLM
from engine.model.interface import AttentionBackend, ForwardBatch
from engine.runner.model_runner import CacheUse, ModelRunner
from engine.sampling_params import SamplingParams
from kernels.cpu import library

WINDOW, BLOCKS = 96, 6  # pages of each sequence


class Counted(CausalLM):
    """Counts how often the model itself is asked."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        self.calls += 1
        return self.model.hidden(batch, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


class Scaled(Counted):
    """Does something in torch."""

    def hidden(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        return super().hidden(batch, attention) * 2


class World:
    """Sequences of random lengths in a runner, each with pages of its own."""

    def __init__(self, loaded: Loaded, sequences: int, wrap: type[Counted] = Counted) -> None:
        self.model = wrap(loaded.model)
        layout = KVLayout.of(loaded.kv_layers, 16)
        pages = [sequences * BLOCKS] * len(layout.groups)
        limits = SchedulerLimits(sequences, 1024, WINDOW)
        use = CacheUse(loaded.transforms)
        self.runner = ModelRunner(self.model, loaded.config, layout, pages, limits, use=use)
        rng = random.Random(sequences)
        for slot in range(sequences):
            length = rng.randrange(1, 40)
            row = NewRow(
                slot=slot,
                request_id=str(slot),
                token_ids=rng.choices(range(256), k=length),
                num_prompt_tokens=length,
                params=SamplingParams(),
                index=0,
                block_ids=[list(range(slot * BLOCKS, (slot + 1) * BLOCKS))] * len(pages),
                num_computed=0,
            )
            self.runner.enter(plan([], [], [row]))
            self.runner.forward(plan([slot], [length]))

    def step(self, counts: dict[int, int], silent: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of one step in which each slot computes so many tokens, and those of `silent` are not read: of
        the runner, and of the model asked directly."""
        runner, rng = self.runner, random.Random(len(counts))
        for slot, count in counts.items():
            for _ in range(count):
                runner.rows.append_tokens(np.array([slot]), np.array([rng.randrange(256)]))
        step = plan(list(counts), list(counts.values()))
        step.samples = [slot not in silent for slot in counts]
        batch = runner._builder.build(step)
        with torch.inference_mode():
            expected = self.model.model.hidden(batch, runner.attention)
        found = runner.forward(step)
        assert found is not None
        return found, expected


def plan(slots: list[int], num_tokens: list[int], new: list[NewRow] | None = None) -> StepPlan:
    return StepPlan(
        step=0,
        slots=slots,
        num_tokens=num_tokens,
        samples=[True] * len(slots),
        new_rows=new or [],
        new_blocks=[],
        copies=[],
        transfers=[],
        freed_slots=[],
    )


@pytest.fixture(autouse=True)
def _library() -> None:
    if library.load() is None:
        pytest.skip(f"no native library: {library.refusal()}")


def tiny(folder: Path, name: str = "gqa", dtype: torch.dtype = torch.bfloat16, **kv: object) -> Loaded:
    path = tiny_models.build(folder, tiny_models.VARIANTS[name])
    loaded = Loaded.load(path, dtype, WINDOW)
    return Loaded(loaded.model, loaded.config, dtype, WINDOW, kv=kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gqa", "attention-bias", "mistral-window", "qwen2", "qwen3", "phi3", "gemma3"])
def test_a_recorded_step_gives_the_models_bits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    world = World(tiny(tmp_path, name, dtype), 5)
    steps = [{0: 1, 1: 1, 2: 1}, {3: 1}, {4: 1, 0: 13, 2: 1}, {1: 7}, {4: 1, 3: 1, 2: 1, 1: 1, 0: 1}, {0: 3, 2: 5}]
    for counts in steps:
        found, expected = world.step(counts, silent=[2])
        assert torch.equal(found, expected), counts
    assert world.model.calls == 1  # once, and no call was made


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp8_e5m2"])
def test_formats_of_the_cache(tmp_path: Path, format: str) -> None:
    world = World(tiny(tmp_path, "head-dim", kv_cache_dtype=format), 3)
    for _ in range(20):  # over a page's end
        found, expected = world.step({0: 1, 1: 2, 2: 1})
        assert torch.equal(found, expected)
    assert world.model.calls == 1


def test_a_step_in_which_nothing_is_read(tmp_path: Path) -> None:
    world = World(tiny(tmp_path), 2)
    found, expected = world.step({0: 3, 1: 1}, silent=[0, 1])
    assert found.shape == expected.shape == (0, 64)
    found, expected = world.step({0: 1, 1: 1})
    assert torch.equal(found, expected)


def test_torch_code_is_run_each_time(tmp_path: Path) -> None:
    world = World(tiny(tmp_path), 2, Scaled)
    before = world.model.calls
    for _ in range(3):
        found, expected = world.step({0: 1, 1: 1})
        assert torch.equal(found, expected * 2)
    assert world.model.calls == before + 3


def test_a_batch_that_lies_elsewhere_is_noticed(tmp_path: Path) -> None:
    world = World(tiny(tmp_path), 2)
    runner = world.runner
    batch = runner._builder.build(plan([0], [1]))
    batch.positions = batch.positions.clone()
    with pytest.raises(AssertionError, match="elsewhere"):
        runner._recorded.hidden(batch, runner.attention)
